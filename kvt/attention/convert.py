"""Convert the weights of a trained attention to an attention in which more, or fewer, roles share projections."""

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.system import UserError

FROM = ("qkv", "kv", "q-kv", "k")  # attentions with no weights except query, key, value and output projections
TO = (*FROM, "kv+phase", "k+phase")
HOW = ("keep_k", "keep_v", "mean")


@torch.no_grad()
def convert_layer(source: Attention, target: Attention, how: str) -> None:
    """Set each projection of `target` from the projections that have the same roles in `source`.

    A projection of `target` with several roles is set to the mean of the projections of `source` that have these roles.
    With "keep_k", a projection that computes keys is set to the key projection of `source` instead, and with "keep_v",
    one that computes values to the value projection. If `target` has fewer key and value heads than `source`, a head of
    `target` is the mean of a group of heads (Ainslie et al. 2023, "GQA").

    Raises UserError if source and target differ in the roles of their projections, and the role that `how` keeps shares
    no projection of `target`.
    """
    keep = how.removeprefix("keep_")  # "k", "v" or "mean"
    shared = {
        name: [role for role, owner in zip("qkv", target.projections, strict=True) if owner == name] for name in "qkv"
    }
    keeps = keep == "mean" or any(keep in roles and len(roles) > 1 for roles in shared.values())
    if not keeps and target.projections != source.projections:  # cross-attention keeps its projections
        raise UserError(f"--how {how}: {type(target).__name__} does not share that projection: choose another --how")
    for name, new in target.projection.items():
        roles = [keep] if keep in shared[name] else shared[name]
        owners = dict.fromkeys(source.projection[source.projections["qkv".index(role)]] for role in roles)
        for part, weight in new.named_parameters():
            mean = torch.stack([_of_heads(owner.get_parameter(part), source) for owner in owners]).mean(0)
            weight.copy_(mean.unflatten(0, (len(weight) // target.head_dim, -1)).mean(1).flatten(0, 1))


def _of_heads(weight: Tensor, layer: Attention) -> Tensor:
    """Return the weight by heads, (heads, head_dim, …); a key or value head is repeated for its query heads."""
    rows = weight.unflatten(0, (-1, layer.head_dim))  # (heads or kv_heads, head_dim, …)
    return rows.repeat_interleave(layer.heads // len(rows), 0)
