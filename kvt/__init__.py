"""kvt: do transformers need queries? Attention variants, models and tasks of the Key-Value Transformer."""

__version__ = "0.1.0"
