"""Gives a trained model another attention."""

from collections.abc import Mapping
from typing import Any

import torch

from kvt.attention import Attention
from kvt.attention.convert import FROM, HOW, TO, convert_layer, fit_layers
from kvt.attention.factory import find_attention, keyword_arguments
from kvt.run.checkpoint_files import HPARAMS
from kvt.run.load_checkpoint import Checkpoint
from kvt.system.errors import UserError, unknown
from kvt.tasks import Task

SAMPLE = 64
"""Number of validation examples of least squares."""


def convert(
    checkpoint: Checkpoint, attn: str, how: str, settings: Mapping[str, Any], places: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a checkpoint saves, its model with another attention and otherwise the same weights.

    The moments of Adam stay with the weights that stay; those of the others begin anew.

    Args:
        checkpoint: of any task.
        attn: the new attention, one of `TO`; the old one must be among `FROM`.
        how: one of `HOW`: see `convert_layer`; least_squares goes on from the mean, with `fit_layers`.
        settings: its keyword arguments; of those of the old one, it keeps what it takes.
        places: where the data of least squares lie, if they have moved.

    Raises:
        UserError: there is no such map of weights.
    """
    old = str(checkpoint.hparams["model"].get("attn"))
    for flag, name, choice in (("--attn", attn, TO), ("--how", how, HOW)):
        if name not in choice:
            raise unknown(flag, name, choice)
    if old not in FROM:
        raise checkpoint.error(f"attn={old} has more than projections to map: convert runs of {', '.join(FROM)}")
    source = checkpoint.load_task(Task)  # type: ignore[type-abstract]
    takes = keyword_arguments(find_attention(attn))
    kept = {name: value for name, value in (source.hparams["attn_kwargs"] or {}).items() if name in takes}
    asked: dict[str, Any] = {"attn": attn, "attn_kwargs": {**kept, **settings} or None}
    if source.hparams.get("match"):  # the model stays as wide as that has made it
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
            raise checkpoint.error("its optimiser has moments of other weights: convert what kvt export writes of it")
        saved["optimizer_states"] = [_moments(state, source, target) for state in saved["optimizer_states"]]
    if recorder := saved.get("callbacks", {}).get("Recorder"):  # its running means and gradients are of the old weights
        saved["callbacks"] = {**saved["callbacks"], "Recorder": {**recorder, "processes": []}}
    return saved


def _attentions(task: Task) -> dict[Attention, str]:
    return {module: name for name, module in task.named_modules() if isinstance(module, Attention)}


def _copy_others(source: Task, target: Task, who: str) -> None:
    """Copy all weights but the projections of attentions."""
    projections = tuple(f"{name}.projection." for name in _attentions(target).values())
    theirs = source.state_dict()
    others = [name for name in target.state_dict() if not name.startswith(projections)]
    if lacking := [name for name in others if name not in theirs]:
        raise UserError(f"{who} has no {lacking[0].rpartition('.')[2]}, which it would have to learn")
    target.load_state_dict({name: theirs[name] for name in others}, strict=False)


@torch.no_grad()
def _calls(task: Task, checkpoint: Checkpoint, places: Mapping[str, str]) -> dict[Attention, dict[str, Any]]:
    """Return what each self-attention of a task is called with, for examples of its validation data."""
    calls: dict[Attention, list[dict[str, Any]]] = {}

    def record(layer: Attention, words: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(words) == 1 and options.get("context") is None:
            call = {"x": words[0], "mask": options.get("mask"), "causal": options.get("causal", False)}
            calls.setdefault(layer, []).append(call)

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in _attentions(task)]
    for batch in checkpoint.load_data(**places).sample(SAMPLE):
        task(*task.inputs(batch))
    for hook in hooks:
        hook.remove()
    return {layer: max(of_layer, key=lambda call: call["x"].numel()) for layer, of_layer in calls.items()}


def _moments(state: Mapping[str, Any], source: Task, target: Task) -> dict[str, Any]:
    """Return an optimiser's state with the moments of the weights that stay."""
    before = {name: (place, weight) for place, (name, weight) in enumerate(source.named_parameters())}
    if [group["params"] for group in state["param_groups"]] != [[*range(len(before))]]:
        raise UserError("the optimiser of this run has groups of weights: convert what kvt export writes of it")
    weights = [*target.named_parameters()]
    stays = {new: before[name][0] for new, (name, weight) in enumerate(weights)
             if name in before and torch.equal(weight, before[name][1])}  # fmt: skip
    kept = {new: state["state"][old] for new, old in stays.items() if old in state["state"]}
    return {"state": kept, "param_groups": [{**state["param_groups"][0], "params": [*range(len(weights))]}]}
