"""Whole models: tokens or images in, logits out."""

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from kvt.attention import Attention
from kvt.errors import UserError, require_positive, require_probability
from kvt.positions import sinusoid
from kvt.transformer import Encoder, EncoderBlock, FeedForward, MakeAttention, PostNorm, PreNorm


class ListTagger(nn.Module):
    """One label for every symbol of a list (Borji 2023, §3.1): a post-norm encoder with sinusoidal positions.

    x = onehot(symbols) W + b + P;  x = LN(x + Drop(Attn(x))), x = LN(x + Drop(FF(x))) `depth` times, FF = dim → 2 dim
    → ReLU → dim;  head = dim → dim → LN → ReLU → Drop → symbols. Xavier-uniform attention projections, zero biases.

    Args:
        make_attention: makes the self-attention layers.
        symbols: size of the alphabet, of input and output alike.
        length: the longest list.
        dim: width, even.
        depth: number of blocks.
        dropout: of residual branches, feed-forward networks and head.
    """

    def __init__(
        self, make_attention: MakeAttention, *, symbols: int, length: int, dim: int, depth: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_positive(length=length, dim=dim, depth=depth)
        require_probability(dropout=dropout)
        self.embed = nn.Linear(symbols, dim)
        self.register_buffer("positions", sinusoid(length, dim), persistent=False)
        self.encoder = Encoder(
            EncoderBlock(
                dim, make_attention, FeedForward(dim, 2 * dim, nn.ReLU, dropout), residual=PostNorm, dropout=dropout
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, symbols)
        )
        for module in self.encoder.modules():
            if isinstance(module, Attention):
                module.init_xavier()

    def forward(self, symbols: Tensor) -> Tensor:
        """int64 (B, N) → logits (B, N, symbols)."""
        x = nn.functional.embedding(symbols, self.embed.weight.T) + self.embed.bias  # onehot(symbols) W + b
        x = x + self.get_buffer("positions")[: symbols.shape[1]]
        return self.head(self.encoder(x))


class ViT(nn.Module):
    """A vision transformer (Borji 2023, §3.2): pre-norm blocks over patches and a class token.

    Patches are flattened and projected; learned positions, N(0, 1), are added; FF = dim → dim → GELU → dim; the head,
    dim → dim → GELU → classes, reads the class token. No final norm, no dropout.

    Args:
        make_attention: makes the self-attention layers.
        channels: of the image.
        height: of the image, in pixels.
        width: of the image, in pixels.
        classes: number of classes.
        patch: side of the square patches; must divide height and width.
        dim: width of the model.
        depth: number of blocks.
    """

    def __init__(
        self,
        make_attention: MakeAttention,
        *,
        channels: int,
        height: int,
        width: int,
        classes: int,
        patch: int,
        dim: int,
        depth: int,
    ) -> None:
        super().__init__()
        require_positive(dim=dim, depth=depth)
        self.patch = patch
        tokens = count_tokens(height, width, patch)
        self.embed = nn.Linear(channels * patch**2, dim)
        self.class_token = nn.Parameter(torch.randn(dim))
        self.positions = nn.Parameter(torch.randn(tokens, dim))
        self.encoder = Encoder(
            EncoderBlock(dim, make_attention, FeedForward(dim, dim, nn.GELU), residual=PreNorm) for _ in range(depth)
        )
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) → logits (B, classes)."""
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=self.patch, q=self.patch)
        class_token = repeat(self.class_token, "d -> b 1 d", b=len(images))
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions  # (B, 1 + patches, dim)
        return self.head(self.encoder(x)[:, 0])


def count_tokens(height: int, width: int, patch: int) -> int:
    """The number of a ViT's tokens: its patches and the class token.

    Raises:
        UserError: `patch` does not divide the image.
    """
    if patch < 1 or height % patch or width % patch:
        raise UserError(f"patch={patch} must divide the image of {height}x{width} pixels")
    return (height // patch) * (width // patch) + 1
