"""The command `kvt convert`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvt.system.console import quick_imports, tell
from kvt.system.errors import UserError
from kvt.system.files import atomically, require_writable, user_path
from kvt.system.quoting import printable

NOTHING: dict[str, Any] = {}


def convert(
    *runs: str,
    attn: str,
    how: str = "mean",
    attn_kwargs: dict[str, Any] = NOTHING,
    out: str | None = None,
    data_dir: str | None = None,
    text: str | None = None,
) -> None:
    """Replace the attention of a trained model, for instance to merge its key and value projections.

    Measure the new checkpoint with kvt validate, and train it further with kvt fit:

        kvt convert lightning_logs/characters/qkv/version_0 --attn q-kv --how keep_v
        kvt validate --ckpt_path q-kv.ckpt
        kvt fit --ckpt_path q-kv.ckpt --max_steps 1200

    The new model has the same outputs as the old model if the merged projections were equal, or if the new attention
    only splits projections. Training continues at the run's step, so --max_steps includes the steps of the run. The
    optimiser keeps its moments for all unchanged weights.

    Args:
        runs: a run's folder, which stands for its best checkpoint, or path to a checkpoint.
        attn: the new attention: qkv, kv, kv+phase, q-kv, k or k+phase. The run's attention must be qkv, kv, q-kv or k.
        how: how to merge projections. keep_k keeps the key projection. keep_v keeps the value projection. mean averages
            both. least_squares starts from the mean and fits each layer's output on 64 training examples of the run, in
            50 steps of L-BFGS.
        attn_kwargs: arguments of the new attention, such as --attn_kwargs.attend_self false. --attn_kwargs.kv_heads 1
            replaces all key and value heads by their mean. All arguments that you do not pass keep their values.
        out: path of the new checkpoint; default: the attention's name with .ckpt, in the working directory.
        data_dir: folder of the data for least_squares; default: the data folder of the run.
        text: path of the text for least_squares; default: the text of the run.
    """
    with quick_imports():
        from kvt.exchange.convert import convert as converted
        from kvt.run.folder import run_of_checkpoint
        from kvt.run.load_checkpoint import Checkpoint

    if len(runs) != 1:
        raise UserError("kvt convert takes one run: pass its folder, or a checkpoint")
    path = require_writable(user_path(out or f"{attn}.ckpt"))
    if run := run_of_checkpoint(path):
        raise UserError(f"--out {path}: is inside the folder of the run {run}: choose another folder")
    places = {name: place for name, place in {"data_dir": data_dir, "text": text}.items() if place is not None}
    saved = converted(Checkpoint(user_path(runs[0]), flag=""), attn, how, attn_kwargs, places)
    _save(saved, path)


def _save(saved: Mapping[str, Any], path: Path) -> None:
    import torch

    with atomically(path) as part, part.open("wb") as file:
        torch.save(saved, file)
    tell(printable(path))
