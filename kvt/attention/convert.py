"""Convert the weights of a trained attention to an attention in which more, or fewer, roles share projections."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.attention.cache import OnePass
from kvt.attention.kernels import allowed_pairs
from kvt.system.errors import UserError

FROM = ("qkv", "kv", "q-kv", "k")
"""Names of the attentions to convert from. These have no weights except query, key, value and output projections."""
TO = (*FROM, "kv+phase", "k+phase")
"""Names of the attentions to convert to."""
HOW = ("keep_k", "keep_v", "mean", "least_squares")
ROLES = "qkv"


@torch.no_grad()
def convert_layer(source: Attention, target: Attention, how: str) -> None:
    """Set each projection of `target` from the projections that have the same roles in `source`.

    A projection of `target` with several roles is set to the mean of the projections of `source` that have these roles.
    With "keep_k", a projection that computes keys is set to the key projection of `source` instead. With "keep_v", a
    projection that computes values is set to the value projection. If `target` has fewer key and value heads than
    `source`, a head of `target` is the mean of a group of heads (Ainslie et al. 2023, "GQA"). The conversion is exact
    if all averaged projections are equal, for instance if `target` has as many heads and a projection for each role.

    Raises:
        UserError: with "keep_k", the keys of `target` share no projection with another role, or with "keep_v" the
            values share none, and source and target differ in the roles of their projections.
    """
    owner_of = dict(zip(ROLES, target.projections, strict=True))
    shared = {name: [role for role in ROLES if owner_of[role] == name] for name in ROLES}
    keep = how[-1] if how.startswith("keep_") else ""
    keeps = any(keep in roles and len(roles) > 1 for roles in shared.values())
    if keep and not keeps and target.projections != source.projections:  # cross-attention keeps its projections
        raise UserError(f"--how {how}: {type(target).__name__} does not share that projection: choose another --how")
    for name, new in target.projection.items():
        roles = [keep] if keep in shared[name] else shared[name]
        owners = dict.fromkeys(source.projection[source.projections[ROLES.index(role)]] for role in roles)
        for part, weight in new.named_parameters():
            of_heads = [_of_heads(owner.get_parameter(part), source) for owner in owners]
            mean = torch.stack(of_heads).mean(0).unflatten(0, (len(weight) // target.head_dim, -1)).mean(1)
            weight.copy_(mean.flatten(0, 1))


def _of_heads(weight: Tensor, layer: Attention) -> Tensor:
    """Return the weight split by heads, (heads, head_dim, …); a key or value head is repeated for its query heads."""
    rows = weight.unflatten(0, (-1, layer.head_dim))  # (heads or kv_heads, head_dim, …)
    return rows.repeat_interleave(layer.heads // len(rows), 0)


def fit_layers(
    sources: Sequence[Attention], targets: Sequence[Attention], calls: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Fit the projections of `targets` to the outputs of `sources` by least squares.

    The fitted error is the sum over layers of ‖target output − source output‖² / ‖source output‖². It includes only
    tokens that at least one query may attend to, which excludes padding. L-BFGS starts from the present weights of
    `targets`.

    Args:
        sources: one layer, or a group of layers that all attend to the keys and values of the first layer.
        targets: the layers to fit, as many as `sources`, with the same output projections as `sources`.
        calls: for each source layer, a list with the keyword arguments of one call per batch: x, (B, N, dim), mask and
            causal.
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
