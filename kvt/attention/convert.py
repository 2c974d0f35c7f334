"""Convert a trained attention to one in which query, key and value share more, or fewer, projections."""

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.system import UserError

FROM = ("qkv", "kv", "q-kv", "k")  # convertible: their only weights are query, key, value and output projections
TO = (*FROM, "kv+phase", "k+phase")
HOW = ("keep_k", "keep_v", "mean")


@torch.no_grad()
def convert_layer(source: Attention, target: Attention, how: str) -> None:
    """Set each projection of `target` from the projections of `source` that have the same roles: query, key or value.

    A projection of `target` with several roles is set to the mean of the projections of `source` that have these roles.
    With how="keep_k", a projection that computes keys is set to the key projection of `source` instead. With "keep_v",
    a projection that computes values is set to the value projection. If `target` has fewer key and value heads than
    `source`, a key or value head of `target` is the mean of a group of heads (Ainslie et al. 2023, "GQA").

    Raises UserError if `how` keeps a role that has a projection of its own in `target`, unless `source` and `target`
    have the same `projections`.
    """
    keep = how.removeprefix("keep_")  # "k", "v" or "mean"
    shared = {
        name: [role for role, owner in zip("qkv", target.projections, strict=True) if owner == name] for name in "qkv"
    }
    keeps = keep == "mean" or any(keep in roles and len(roles) > 1 for roles in shared.values())
    if not keeps and target.projections != source.projections:  # equal in cross-attention, which is always `QKV`
        raise UserError(f"--how {how}: {type(target).__name__} does not share that projection: choose another --how")
    for name, new in target.projection.items():
        roles = [keep] if keep in shared[name] else shared[name]
        owners = dict.fromkeys(source.projection[source.projections["qkv".index(role)]] for role in roles)
        for part, weight in new.named_parameters():
            mean = torch.stack([_of_heads(owner.get_parameter(part), source) for owner in owners]).mean(0)
            weight.copy_(mean.unflatten(0, (len(weight) // target.head_dim, -1)).mean(1).flatten(0, 1))


def _of_heads(weight: Tensor, layer: Attention) -> Tensor:
    """Split a weight into heads, (heads, head_dim, …); a key or value head is repeated for each of its query heads."""
    rows = weight.unflatten(0, (-1, layer.head_dim))
    return rows.repeat_interleave(layer.heads // len(rows), 0)
