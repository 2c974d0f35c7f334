"""Models that compute outputs for every element of a list or a set."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.kernels import Dropout
from kvt.attention.ordinary import is_plain
from kvt.attention.positions import sinusoid
from kvt.models.blocks import BlockStyle, Encoder, EncoderBlock, MakeAttention, factory_of
from kvt.models.init import xavier_attention
from kvt.system import require_positive, require_probability

STYLE = BlockStyle("post", "relu", 2)


class Tagger(nn.Module):
    """An encoder between an embedding and a head that labels every element (Borji 2023, §3.1, §3.2).

    With the default `style`, each of `depth` blocks computes x = LN(x + Drop(Attn(x))) and x = LN(x + Drop(FF(x))),
    with the feed-forward network FF: dim → 2 dim → ReLU → Drop → dim. The head is dim → dim → LN → ReLU → Drop →
    outputs. `xavier_attention` initialises the attention projections. A subclass defines `forward`, which embeds the
    elements and calls `label`.

    `embed` is a linear layer from an element to the model width. `outputs` is the number of outputs per element.
    """

    def __init__(
        self,
        embed: nn.Linear,
        make_attention: MakeAttention,
        *,
        outputs: int,
        depth: int,
        dropout: float = 0.0,
        style: BlockStyle = STYLE,
    ) -> None:
        super().__init__()
        require_probability(dropout=dropout)
        self.embed, dim = embed, embed.out_features
        self.encoder = Encoder(
            depth,
            lambda: EncoderBlock(
                style.residual(dim, make_attention(dim), dropout), style.feed_forward(dim, dropout, dropout)
            ),
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, outputs)
        )
        xavier_attention(self)

    def label(self, x: Tensor) -> Tensor:
        """Apply encoder and head: (B, N, dim) → (B, N, outputs)."""
        return self.head(self.encoder(x))


class ListTagger(Tagger):
    """A `Tagger` that labels every symbol of a list (Borji 2023, §3.1).

    The input of the encoder is onehot(symbols) W + b + P with sinusoidal positions P, (length, dim), so `dim` must be
    even. Symbols and labels are integers from 0 to `vocab_size` − 1.

    >>> import torch
    >>> model = ListTagger("kv", heads=4, vocab_size=10, length=16, dim=32, depth=2)
    >>> model(torch.zeros(5, 16, dtype=torch.long)).shape
    torch.Size([5, 16, 10])

    Args:
        attention: name or import path of the attention, such as "kv"; or a function from a width to a layer.
        heads: number of heads, if `attention` is a name or import path.
        vocab_size: number of symbols.
        length: number of symbols of the longest list.
        dim: model width.
        settings: further arguments of `Tagger`.
    """

    def __init__(
        self,
        attention: str | MakeAttention,
        *,
        heads: int | None = None,
        vocab_size: int,
        length: int,
        dim: int,
        **settings: Any,
    ) -> None:
        require_positive(length=length, dim=dim)
        make_attention = factory_of(attention, heads, length)
        super().__init__(nn.Linear(vocab_size, dim), make_attention, outputs=vocab_size, **settings)
        self.vocab_size = vocab_size
        self.register_buffer("positions", sinusoid(length, dim), persistent=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of the labels: int64 (B, N) → (B, N, vocab_size)."""
        positions = self.get_buffer("positions")[: symbols.shape[1]]
        if is_plain(self.embed):  # this equals onehot(symbols) W + b, and is faster
            x = F.embedding(symbols, self.embed.weight.T) + self.embed.bias
        else:
            x = self.embed(F.one_hot(symbols, self.vocab_size).to(positions.dtype))
        return self.label(x + positions)


class SetScorer(Tagger):
    """A `Tagger` that scores every image of a set from the features of all images (Borji 2023, §3.2).

    The input of the encoder is Drop(features) W + b, without positions. The model is permutation equivariant unless the
    attention encodes positions.

    >>> import torch
    >>> SetScorer("kv", heads=4, feature_dim=512, dim=32, depth=2)(torch.zeros(5, 10, 512)).shape
    torch.Size([5, 10])

    Args:
        attention, heads, dim, settings: as in `ListTagger`.
        max_len: number of images of the largest set; required if `attention` names a `MapPosition`, such as "kv+pos".
        feature_dim: number of features of an image.
        dropout: dropout probability of the features, and of `Tagger`.
    """

    def __init__(
        self,
        attention: str | MakeAttention,
        *,
        heads: int | None = None,
        max_len: int | None = None,
        feature_dim: int,
        dim: int,
        dropout: float = 0.0,
        **settings: Any,
    ) -> None:
        require_positive(feature_dim=feature_dim, dim=dim)
        make_attention = factory_of(attention, heads, max_len)
        super().__init__(nn.Linear(feature_dim, dim), make_attention, outputs=1, dropout=dropout, **settings)
        self.dropout = Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Return a logit for each of the S images of a set: (B, S, feature_dim) → (B, S)."""
        return self.label(self.embed(self.dropout(features))).squeeze(-1)
