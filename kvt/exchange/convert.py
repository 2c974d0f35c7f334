"""Replaces the attention of a trained model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kvt.attention import Attention
from kvt.attention.convert import FROM, HOW, TO, convert_layer, fit_layers
from kvt.attention.factory import find_attention, keyword_arguments
from kvt.run.checkpoint_files import HPARAMS
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.same import load_data
from kvt.system.errors import UserError, unknown
from kvt.tasks import Task
from kvt.tasks.optimizers import make_optimizer

EXPORT_FIRST = "export the run with kvt export, and convert the export"
SAMPLE = 64
"""Number of training examples for `how="least_squares"`."""


def convert(
    checkpoint: Checkpoint, attn: str, how: str, settings: Mapping[str, Any], places: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of a new checkpoint with another attention. All weights outside attentions stay unchanged.

    The optimiser keeps its state for the unchanged weights. The converted weights start with a new optimiser state.

    Args:
        checkpoint: a checkpoint of any task.
        attn: the new attention, one of `TO`; the old attention must be among `FROM`.
        how: one of `HOW`, see `convert_layer`. "least_squares" converts as "mean" does, and then calls `fit_layers`.
        settings: keyword arguments of the new attention. It also keeps the old attention's arguments that it knows.
        places: new paths of moved data, as a mapping from setting to path. Only "least_squares" reads the data.

    Raises:
        UserError: `attn` or `how` is unknown, or the weights cannot be converted.
    """
    old = str(checkpoint.hparams["model"].get("attn"))
    for flag, name, choice in (("--attn", attn, TO), ("--how", how, HOW)):
        if name not in choice:
            raise unknown(flag, name, choice)
    if old not in FROM:
        raise checkpoint.error(f"attn={old} has weights that cannot be converted: convert runs of {', '.join(FROM)}")
    source = checkpoint.load_task(Task)  # type: ignore[type-abstract]
    takes = keyword_arguments(find_attention(attn))
    kept = {name: value for name, value in (source.hparams["attn_kwargs"] or {}).items() if name in takes}
    asked: dict[str, Any] = {"attn": attn, "attn_kwargs": {**kept, **settings} or None}
    if source.hparams.get("match"):  # keeps the width that the setting `match` chose in training
        asked |= {"match": None, "expansion": source.expansion}
    target = type(source)(**{**source.hparams, **asked}).to(source.dtype).eval()
    _copy_others(source, target, f"--attn {attn}: {old}")
    layers = [*zip(_attentions(source), _attentions(target), strict=True)]
    for old_layer, new_layer in layers:
        convert_layer(old_layer, new_layer, how)
    if how == "least_squares":
        calls = _calls(source, checkpoint, places)
        groups: list[list[tuple[Attention, Attention]]] = []
        for old_layer, new_layer in layers:
            if old_layer.borrows_keys:
                groups[-1].append((old_layer, new_layer))
            elif old_layer in calls:
                groups.append([(old_layer, new_layer)])
        for group in groups:
            sources, targets = zip(*group, strict=True)
            fit_layers(sources, targets, [calls[layer] for layer in sources])
    saved = {**checkpoint.saved, "state_dict": target.state_dict(), "metrics": {}}
    saved[HPARAMS["model"]] = {**saved[HPARAMS["model"]], **asked}
    if "optimizer_states" in saved:
        if not saved.keys().isdisjoint(("averaging_state", "training_weights")):
            raise checkpoint.error(f"its optimiser's state is not of these weights: {EXPORT_FIRST}")
        source.optimizer_config = target.optimizer_config = checkpoint.optimizer
        saved["optimizer_states"] = [_optimizer_state(state, source, target) for state in saved["optimizer_states"]]
    if recorder := saved.get("callbacks", {}).get("Recorder"):  # drops records about the old weights
        saved["callbacks"] = {**saved["callbacks"], "Recorder": {**recorder, "processes": []}}
    return saved


def _attentions(task: Task) -> dict[Attention, str]:
    return {module: name for name, module in task.named_modules() if isinstance(module, Attention)}


def _copy_others(source: Task, target: Task, who: str) -> None:
    """Copy all weights except the projections of attentions."""
    projections = tuple(f"{name}.projection." for name in _attentions(target).values())
    theirs = source.state_dict()
    others = [name for name in target.state_dict() if not name.startswith(projections)]
    if lacking := [name for name in others if name not in theirs]:
        raise UserError(f"{who} has no weight {lacking[0].rpartition('.')[2]} to copy: choose another attention")
    target.load_state_dict({name: theirs[name] for name in others}, strict=False)


@torch.no_grad()
def _calls(task: Task, checkpoint: Checkpoint, places: Mapping[str, str]) -> dict[Attention, list[dict[str, Any]]]:
    """Return for each self-attention layer the arguments of its calls on batches of training examples."""
    calls: dict[Attention, list[dict[str, Any]]] = {}

    def record(layer: Attention, words: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(words) == 1 and options.get("context") is None:
            call = {"x": words[0], "mask": options.get("mask"), "causal": options.get("causal", False)}
            calls.setdefault(layer, []).append(call)

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in _attentions(task)]
    for batch in load_data(checkpoint, **places).sample(SAMPLE, "train"):
        task(*task.inputs(batch))
    for hook in hooks:
        hook.remove()
    return calls


def _optimizer_state(state: Mapping[str, Any], source: Task, target: Task) -> dict[str, Any]:
    """Return an optimiser's state for `target`, with the state of `source` for unchanged weights.

    Most optimisers of torch create the state of a weight at the first step, so changed weights need no state here.
    Adagrad creates the state in its constructor. SGD creates the momentum of all weights at once, so changed weights
    get a zero momentum. The state of L-BFGS does not belong to single weights, so this function drops it.
    """
    before, after = make_optimizer(source), make_optimizer(target)
    sizes = [len(group["params"]) for group in before.param_groups]
    if [len(group["params"]) for group in state["param_groups"]] != sizes:
        raise UserError(f"the optimiser of this run has several groups of weights: {EXPORT_FIRST}")
    new = after.state_dict()
    kept = {} if isinstance(after, torch.optim.LBFGS) else state["state"]
    old = {name: (place, weight) for place, (name, weight) in enumerate(_in_order(before, source))}
    for place, (name, weight) in enumerate(_in_order(after, target)):
        its_place, its_weight = old.get(name, (-1, weight))
        if its_place in kept and torch.equal(weight, its_weight):
            new["state"][place] = kept[its_place]
        elif kept and isinstance(after, torch.optim.SGD):
            new["state"][place] = {"momentum_buffer": torch.zeros_like(weight)}
    groups = zip(state["param_groups"], new["param_groups"], strict=True)
    return {**new, "param_groups": [{**ours, "params": theirs["params"]} for ours, theirs in groups]}


def _in_order(optimizer: Optimizer, task: Task) -> list[tuple[str, Tensor]]:
    """Return pairs (name, weight) of a task's weights, in the order in which its optimiser lists the weights."""
    names = {id(weight): name for name, weight in task.named_parameters()}
    return [(names[id(weight)], weight) for group in optimizer.param_groups for weight in group["params"]]
