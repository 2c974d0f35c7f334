"""Converts models to other attentions; imports GPT-2; exports to safetensors, ONNX and the Hugging Face hub."""
