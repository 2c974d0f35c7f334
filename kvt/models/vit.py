"""The vision transformer."""

from collections.abc import Callable

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from kvt.models.blocks import BlockStyle, Encoder, EncoderBlock, MakeAttention, factory_of
from kvt.system import UserError, require_choice, require_positive, require_probability

STYLE = BlockStyle("pre", "gelu", 1)
Pool = Callable[[Encoder, Tensor], Tensor]


def class_token(encoder: Encoder, x: Tensor) -> Tensor:
    return encoder(x, token=0)


def mean_of_patches(encoder: Encoder, x: Tensor) -> Tensor:
    return encoder(x)[:, 1:].mean(1)


POOLS: dict[str, Pool] = {"class": class_token, "mean": mean_of_patches}  # functions that compute the input of the head


class ViT(nn.Module):
    """A vision transformer over patches and a class token, without final norm (Borji 2023, §3.2).

    Learned positions are initialised from N(0, 1). The default `style` has pre-norm blocks with the feed-forward
    network dim → dim → GELU → Drop → dim. The head is dim → dim → GELU → classes.

    >>> sizes = {"channels": 3, "height": 8, "width": 8, "classes": 10, "patch": 4, "dim": 16, "depth": 2}
    >>> ViT("kv", heads=4, **sizes)(torch.zeros(5, 3, 8, 8)).shape
    torch.Size([5, 10])

    Args:
        attention: name or import path of the attention, such as "kv"; or a function from a width to a layer.
        heads: number of heads, if `attention` is a name or import path.
        patch: height and width of a patch in pixels; must divide the height and the width of the image.
        dropout: dropout probability in residual branches and in feed-forward networks.
        pool: input of the head: the output of the class token ("class"), or the mean output of all patches ("mean").
    """

    def __init__(
        self,
        attention: str | MakeAttention,
        *,
        heads: int | None = None,
        channels: int,
        height: int,
        width: int,
        classes: int,
        patch: int,
        dim: int,
        depth: int,
        dropout: float = 0.0,
        pool: str = "class",
        style: BlockStyle = STYLE,
    ) -> None:
        super().__init__()
        require_positive(dim=dim)
        require_probability(dropout=dropout)
        require_choice("pool", pool, POOLS)
        self.patch, self.pool = patch, POOLS[pool]
        tokens = count_tokens(height, width, patch)
        make_attention = factory_of(attention, heads, tokens)
        self.embed = nn.Linear(channels * patch**2, dim)
        self.class_token = nn.Parameter(torch.randn(dim))
        self.positions = nn.Parameter(torch.randn(tokens, dim))
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(
                style.residual(dim, make_attention(dim), dropout), style.feed_forward(dim, dropout, dropout)
            ),
        )
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of normalised images: (B, C, H, W) → (B, classes)."""
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=self.patch, q=self.patch)
        class_token = repeat(self.class_token, "d -> b 1 d", b=images.shape[0])
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions  # (B, 1 + patches, dim)
        return self.head(self.pool(self.encoder, x))


def count_tokens(height: int, width: int, patch: int) -> int:
    """Return the number of patches plus one class token; raise UserError unless `patch` divides height and width."""
    if patch < 1 or height % patch or width % patch:
        raise UserError(f"patch={patch} must divide width and height of the image, {width}x{height} pixels")
    return (height // patch) * (width // patch) + 1
