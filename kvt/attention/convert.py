"""Convert the weights of a trained attention to an attention that shares more, or fewer, projections."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.attention.cache import OnePass
from kvt.attention.kernels import allowed_pairs
from kvt.system.errors import UserError

FROM = ("qkv", "kv", "q-kv", "k")
"""Names of the attentions to convert from. Their only weights are the query, key, value and output projections."""
TO = (*FROM, "kv+phase", "k+phase")
"""Names of the attentions to convert to."""
HOW = ("keep_k", "keep_v", "mean", "least_squares")
ROLES = "qkv"


@torch.no_grad()
def convert_layer(source: Attention, target: Attention, how: str) -> None:
    """Set each projection of `target` from the projections that have the same roles in `source`.

    A projection with several roles is the mean of the source's projections of these roles. With "keep_k", it is the
    key's projection if the key is among the roles; with "keep_v", the value's projection if the value is. If `target`
    has fewer key and value heads, each of them is the mean of a group of heads (Ainslie et al. 2023, "GQA"). The
    conversion is exact if all averaged projections are equal, for instance if `target` only separates projections that
    `source` shares.

    Raises:
        UserError: `how` names a projection to keep that `target` does not share, and `target` shares other projections.
    """
    owner_of = dict(zip(ROLES, target.projections, strict=True))
    shared = {name: [role for role in ROLES if owner_of[role] == name] for name in ROLES}
    keep = how[-1] if how.startswith("keep_") else ""
    keeps = any(keep in roles and len(roles) > 1 for roles in shared.values())
    if keep and not keeps and target.projections != source.projections:  # cross-attention keeps its projections
        raise UserError(f"--how {how}: {type(target).__name__} does not share that projection: choose another")
    for name, new in target.projection.items():
        roles = [keep] if keep in shared[name] else shared[name]
        owners = dict.fromkeys(source.projection[source.projections[ROLES.index(role)]] for role in roles)
        for part, weight in new.named_parameters():
            of_heads = [_of_heads(owner.get_parameter(part), source) for owner in owners]
            mean = torch.stack(of_heads).mean(0).unflatten(0, (len(weight) // target.head_dim, -1)).mean(1)
            weight.copy_(mean.flatten(0, 1))


def _of_heads(weight: Tensor, layer: Attention) -> Tensor:
    """Split a projection by heads, (heads, head_dim, …), and repeat a shared head for the heads of its group."""
    rows = weight.unflatten(0, (-1, layer.head_dim))  # (heads or kv_heads, head_dim, …)
    return rows.repeat_interleave(layer.heads // len(rows), 0)


def fit_layers(
    sources: Sequence[Attention], targets: Sequence[Attention], calls: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Fit the projections of `targets` to the outputs of `sources` by least squares.

    The error counts the outputs of tokens that at least one query may attend to, which excludes padding. A layer's
    error is its sum of squared differences divided by the sum of squares of the source's output. L-BFGS starts from
    the present weights of `targets`.

    Args:
        sources: one layer, or a group of layers in which all use the keys and values of the first.
        targets: the layers to fit, as many as `sources` and with the same output projections.
        calls: a list for each source layer, with the keyword arguments of its call for each batch: x, (B, N, dim),
            mask and causal.
    """
    batches = [*zip(*calls, strict=True)]
    counted = [[_attended(**call) for call in batch] for batch in batches]

    def outputs(layers: Sequence[Attention], number: int) -> list[Tensor]:
        shared = {"cache": OnePass()} if len(layers) > 1 else {}
        each = zip(layers, batches[number], counted[number], strict=True)
        return [layer(**call, **shared)[at] for layer, call, at in each]

    with torch.no_grad():
        wanted = [outputs(sources, number) for number in range(len(batches))]
    sizes = [
        torch.stack([theirs.square().sum() for theirs in of_layer]).sum() for of_layer in zip(*wanted, strict=True)
    ]
    weights = [weight for layer in targets for weight in layer.projection.parameters()]
    optimizer = torch.optim.LBFGS(weights, max_iter=50, line_search_fn="strong_wolfe")

    def error() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for number, of_batch in enumerate(wanted):
            triples = zip(outputs(targets, number), of_batch, sizes, strict=True)
            loss = torch.stack([(ours - theirs).square().sum() / size for ours, theirs, size in triples]).sum()
            torch.autograd.backward(loss, inputs=weights)  # one batch at a time, to save memory
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    optimizer.step(error)


def _attended(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return a boolean mask, (B, N), of the tokens of x, (B, N, dim), that at least one query may attend to."""
    batch, length, _ = x.shape
    pairs = torch.ones(batch, 1, length, length, dtype=torch.bool, device=x.device)
    allowed = allowed_pairs(length, length, mask, causal, x.device)
    return (pairs if allowed is None else pairs & allowed).any(-2).any(1)
