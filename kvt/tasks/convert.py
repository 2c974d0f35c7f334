"""Copies a trained task with another attention, for instance with merged key and value projections."""

from collections.abc import Mapping
from typing import Any

from kvt.attention import Attention
from kvt.attention.convert import FROM, HOW, TO, convert_layer
from kvt.attention.factory import find_attention, keyword_arguments
from kvt.system import UserError, require_choice
from kvt.tasks.base import Task


def convert_task(source: Task, attn: str, how: str, attn_kwargs: Mapping[str, Any]) -> Task:
    """Return a copy of a task, with `attn` as the attention of its layers; raise UserError if that is not possible.

    Args:
        source: the task to convert; its attention must be one of `FROM`.
        attn: the new attention, one of `TO`.
        how: how projections are merged, one of `HOW`.
        attn_kwargs: arguments of the new attention. For any other argument, the value in `source` is kept if the new
            attention accepts the argument.
    """
    require_choice("--attn", attn, TO)
    require_choice("--how", how, HOW)
    if source.attn not in FROM:
        raise UserError(f"attn={source.attn} has weights that cannot be converted: convert runs of {', '.join(FROM)}")
    takes = keyword_arguments(find_attention(attn))
    kept = {name: value for name, value in (source.hparams["attn_kwargs"] or {}).items() if name in takes}
    asked: dict[str, Any] = {"attn": attn, "attn_kwargs": {**kept, **attn_kwargs} or None}
    if source.hparams.get("match"):  # keeps the expansion that `match` chose in training
        asked |= {"match": None, "expansion": source.expansion}
    target = type(source)(**{**source.hparams, **asked}).to(source.dtype)
    ours, theirs = target.state_dict(), source.state_dict()
    same = {name: theirs[name] for name in ours if name in theirs and ours[name].shape == theirs[name].shape}
    if lacking := [name for name in ours if name not in same and ".projection." not in name]:
        raise UserError(f"--attn {attn}: {source.attn} has no weight {lacking[0].rpartition('.')[2]} to copy")
    target.load_state_dict(same, strict=False)
    layers = ([part for part in task.modules() if isinstance(part, Attention)] for task in (source, target))
    for old_layer, new_layer in zip(*layers, strict=True):
        convert_layer(old_layer, new_layer, how)
    return target
