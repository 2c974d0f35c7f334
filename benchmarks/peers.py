"""Encoders and language models of other libraries, as similar to `kvt`'s models with `qkv` as possible."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Write = Callable[[Tensor, int], Tensor]
"""A function that continues prompts, (B, N), greedily with a cache, and returns the new tokens, (B, tokens)."""


class TorchAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` as self-attention without maps: (B, N, dim) → (B, N, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def torch_encoder(
    dim: int, depth: int, heads: int, *, hidden: int, activation: type[nn.Module], dropout: float, norm_first: bool
) -> nn.Module:
    """Return a `torch.nn.TransformerEncoder`: the same formula, with biases in all layers."""
    layer = nn.TransformerEncoderLayer(
        dim, heads, hidden, dropout, activation=activation(), batch_first=True, norm_first=norm_first
    )
    layer.self_attn.dropout = 0.0  # kvt's models do not drop attention weights
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def x_transformers_encoder(
    dim: int, depth: int, heads: int, *, hidden: int, activation: type[nn.Module], dropout: float, norm_first: bool
) -> nn.Module:
    """Return an `x_transformers.Encoder` with fused kernels: the same formula without biases in attention and norms."""
    from x_transformers import Encoder

    settings: dict[str, Any] = {
        "attn_dim_head": dim // heads,
        "attn_flash": True,
        "attn_sublayer_dropout": dropout,
        "ff_mult": hidden / dim,
        "ff_custom_activation": activation(),
        "ff_dropout": dropout,
        "ff_sublayer_dropout": dropout,
        "pre_norm": norm_first,
        "pre_norm_has_final_norm": False,
    }
    return Encoder(dim=dim, depth=depth, heads=heads, verbose=False, **settings)


def vit_pytorch(*, channels: int, side: int, classes: int, patch: int, dim: int, depth: int, heads: int) -> nn.Module:
    """Return a `vit_pytorch.ViT`.

    It differs from the paper's ViT by norms around the patch embedding and after the last block, by
    α = 1/√(dim / heads), and by a head of one layer.
    """
    from vit_pytorch import ViT

    return ViT(
        image_size=side,
        patch_size=patch,
        num_classes=classes,
        channels=channels,
        dim=dim,
        depth=depth,
        heads=heads,
        dim_head=dim // heads,
        mlp_dim=dim,
    )


def gpt2(*, symbols: int, window: int, dim: int, depth: int, heads: int) -> tuple[nn.Module, Write]:
    """Return a model, and a function that generates tokens with it.

    The model is a `transformers.GPT2LMHeadModel`: like `CausalLM`, but with biases in attention and none in the head.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {
        **{"vocab_size": symbols, "n_positions": window, "n_embd": dim, "n_layer": depth, "n_head": heads},
        **{"activation_function": "relu", "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
    }
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()

    def write(prompt: Tensor, tokens: int) -> Tensor:
        how = {"max_new_tokens": tokens, "do_sample": False}
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        return text[:, prompt.shape[1] :]

    return model, write


def x_transformers_writer(*, symbols: int, window: int, dim: int, depth: int, heads: int) -> tuple[nn.Module, Write]:
    """Return a model of x-transformers, and a function that generates tokens with it.

    The model is like `CausalLM`, but without biases in attention, norms and the head.
    """
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    decoder = Decoder(
        dim=dim,
        depth=depth,
        heads=heads,
        attn_dim_head=dim // heads,
        attn_flash=True,
        ff_custom_activation=nn.ReLU(),
        verbose=False,
    )
    model = TransformerWrapper(num_tokens=symbols, max_seq_len=window, attn_layers=decoder).eval()
    wrapper = AutoregressiveWrapper(model).eval()
    return model, lambda prompt, tokens: wrapper.generate(prompt, tokens, temperature=0.0, cache_kv=True)
