"""Checkpoints as a user hands them in: a file that may be missing, broken, or another model's."""

from pathlib import Path
from typing import Any

import torch

from kvt.errors import UserError
from kvt.tasks import Task


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a file. No code in it is run.

    Raises:
        UserError: there is no such file, or it is no checkpoint of a Lightning module.
    """
    if not Path(path).is_file():
        raise UserError(f"--ckpt_path {path}: no such file; a run keeps its own under checkpoints/")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not {"state_dict", "hyper_parameters"} <= set(checkpoint):
            raise KeyError
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"--ckpt_path {path}: not a checkpoint of kvt, or a broken one") from error
    return checkpoint


def require_fit(path: str | Path, task: Task) -> None:
    """Makes sure that the checkpoint belongs to a model made with these very settings.

    Raises:
        UserError: a setting differs, or the weights have other names or shapes.
    """
    checkpoint = read_checkpoint(path)
    theirs, ours = checkpoint["hyper_parameters"], dict(task.hparams)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            there, here = (_short(settings.get(name)) for settings in (theirs, ours))
            raise UserError(f"--ckpt_path {path}: made with {name}={there}, not {here}: give the run's own config.yaml")
    shapes = {name: tensor.shape for name, tensor in task.state_dict().items()}
    if {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()} != shapes:
        raise UserError(f"--ckpt_path {path}: its weights do not fit a {type(task).__name__} with these settings")


def _short(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
