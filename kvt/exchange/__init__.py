"""Converts models to other attentions; exports to safetensors, ONNX and the Hugging Face hub."""
