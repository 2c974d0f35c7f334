"""The model of images."""

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from kvt.models.blocks import Encoder, EncoderBlock, FeedForward, MakeAttention, PreNorm
from kvt.system.errors import UserError, require_positive


class ViT(nn.Module):
    """A vision transformer (Borji 2023, §3.2): pre-norm blocks over patches and a class token.

    Patches are flattened and projected; learned positions, initialised from N(0, 1), are added; FF = dim → dim → GELU →
    dim; the head, dim → dim → GELU → classes, reads the class token. No final norm, no dropout.

    Args:
        patch: side of the square patches in pixels; must divide height and width.
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
        require_positive(dim=dim)
        self.patch = patch
        tokens = count_tokens(height, width, patch)
        self.embed = nn.Linear(channels * patch**2, dim)
        self.class_token = nn.Parameter(torch.randn(dim))
        self.positions = nn.Parameter(torch.randn(tokens, dim))
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(PreNorm(dim, make_attention(dim)), PreNorm(dim, FeedForward(dim, dim, nn.GELU))),
        )
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, H, W) → logits (B, classes)."""
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=self.patch, q=self.patch)
        class_token = repeat(self.class_token, "d -> b 1 d", b=images.shape[0])
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions  # (B, 1 + patches, dim)
        return self.head(self.encoder(x, token=0))


def count_tokens(height: int, width: int, patch: int) -> int:
    """Return the number of patches and the class token; raise UserError unless `patch` divides the image."""
    if patch < 1 or height % patch or width % patch:
        raise UserError(f"patch={patch} must divide the image of {width}x{height} pixels")
    return (height // patch) * (width // patch) + 1
