"""Models that come from elsewhere or go elsewhere: other attentions, GPT-2 checkpoints, the Hugging Face hub, ONNX."""
