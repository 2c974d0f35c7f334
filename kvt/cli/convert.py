"""The command `kvt convert`."""

from typing import Any

from kvt.system import UserError, atomically, printable, require_writable, tell, unknown, user_path

NOTHING: dict[str, Any] = {}
KEPT = ("hyper_parameters", "datamodule_hyper_parameters", "config")
"""The keys of a checkpoint that the converted checkpoint keeps. It has no state of the optimiser and no history."""


def convert(
    *runs: str, attn: str, how: str = "mean", attn_kwargs: dict[str, Any] = NOTHING, out: str | None = None
) -> None:
    """Replace the attention of a trained model, for instance to merge its key and value projections.

    Measure the new checkpoint with kvt validate, and train it further with kvt fit:

        kvt convert lightning_logs/characters/qkv/version_0 --attn q-kv --how keep_v
        kvt validate --ckpt_path q-kv.ckpt
        kvt fit --ckpt_path q-kv.ckpt --max_steps 200

    The new model has the same outputs as the old model if the merged projections were equal, or if the new attention
    only splits projections. Training begins at step 0, with a new state of the optimiser.

    Args:
        runs: a run's folder, which stands for its best checkpoint, or path to a checkpoint.
        attn: the new attention: qkv, kv, kv+phase, q-kv, k or k+phase. The run's attention must be qkv, kv, q-kv or k.
        how: how to merge projections. keep_k keeps the key projection. keep_v keeps the value projection. mean averages
            both.
        attn_kwargs: arguments of the new attention, such as --attn_kwargs.attend_self false. --attn_kwargs.kv_heads 1
            replaces all key and value heads by their mean. All arguments that you do not pass keep their values.
        out: path of the new checkpoint; default: the attention's name with .ckpt, in the working directory.
    """
    import torch

    from kvt.attention import Attention
    from kvt.attention.convert import FROM, HOW, TO, convert_layer
    from kvt.attention.factory import find_attention, keyword_arguments
    from kvt.run.folder import run_of_checkpoint
    from kvt.run.load_checkpoint import Checkpoint
    from kvt.tasks import Task

    if len(runs) != 1:
        raise UserError("kvt convert takes one run: pass its folder, or a checkpoint")
    for flag, name, choice in (("--attn", attn, TO), ("--how", how, HOW)):
        if name not in choice:
            raise unknown(flag, name, choice)
    path = require_writable(user_path(out or f"{attn}.ckpt"))
    if run := run_of_checkpoint(path):
        raise UserError(f"--out {path}: is inside the folder of the run {run}: choose another folder")
    checkpoint = Checkpoint(user_path(runs[0]), flag="")
    if (old := checkpoint.section("model")["init_args"].get("attn")) not in FROM:
        raise checkpoint.error(f"attn={old} has weights that cannot be converted: convert runs of {', '.join(FROM)}")
    source: Task = checkpoint.load_task(Task)  # type: ignore[type-abstract]
    takes = keyword_arguments(find_attention(attn))
    kept = {name: value for name, value in (source.hparams["attn_kwargs"] or {}).items() if name in takes}
    asked: dict[str, Any] = {"attn": attn, "attn_kwargs": {**kept, **attn_kwargs} or None}
    if source.hparams.get("match"):  # keeps the width that the setting `match` chose in training
        asked |= {"match": None, "expansion": source.expansion}
    target = type(source)(**{**source.hparams, **asked}).to(source.dtype)
    ours, theirs = target.state_dict(), source.state_dict()
    same = {name for name in ours.keys() & theirs.keys() if ours[name].shape == theirs[name].shape}
    if lacking := [name for name in ours if name not in same and ".projection." not in name]:
        lack = f"--attn {attn}: {old} has no weight {lacking[0].rpartition('.')[2]} to copy"
        raise UserError(f"{lack}: choose another attention")
    target.load_state_dict({name: theirs[name] for name in same}, strict=False)
    layers = ([part for part in task.modules() if isinstance(part, Attention)] for task in (source, target))
    for old_layer, new_layer in zip(*layers, strict=True):
        convert_layer(old_layer, new_layer, how)
    saved = {key: checkpoint.saved[key] for key in KEPT if key in checkpoint.saved}
    saved["hyper_parameters"] = {**saved["hyper_parameters"], **asked}
    model = saved["config"]["model"]
    saved["config"] |= {"model": {**model, "init_args": {**model["init_args"], **asked}}, "ckpt_path": None}
    saved |= {"state_dict": target.state_dict(), "epoch": 0, "global_step": 0, "metrics": {}}
    with atomically(path) as part, part.open("wb") as file:
        torch.save(saved, file)
    tell(printable(path))
