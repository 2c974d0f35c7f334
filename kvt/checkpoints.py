"""Checkpoints as a user hands them in: a file that may be missing, broken, or another model's."""

import os
from collections.abc import Mapping
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any, TypeVar

import torch
import yaml

from kvt.errors import UserError
from kvt.tasks import Task, TaskData

AnyTask = TypeVar("AnyTask", bound=Task)
Kind = TypeVar("Kind")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a file. No code in it is run.

    Raises:
        UserError: there is no such file, or it is no checkpoint of a Lightning module.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, no error where the name is too long
        raise UserError(f"--ckpt_path {path}: no such file; a run keeps its own under checkpoints/")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(checkpoint[key], Mapping) for key in ("state_dict", "hyper_parameters")):
            raise TypeError
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"--ckpt_path {path}: not a checkpoint of kvt, or a broken one") from error
    return checkpoint


def load_task(path: str | Path, kind: type[AnyTask]) -> AnyTask:
    """The trained task in a checkpoint, in eval mode.

    Its class, and that of its attention, are imported by the names in the checkpoint.

    Raises:
        UserError: there is none, or not of this kind.
    """
    checkpoint = read_checkpoint(path)
    found = find_class(path, checkpoint, "model", kind)
    try:
        task = found(**checkpoint["hyper_parameters"])
        task.load_state_dict(checkpoint["state_dict"])
    except (TypeError, RuntimeError) as error:
        raise UserError(f"--ckpt_path {path}: does not fit the {found.__name__} of this version") from error
    return task.eval()


def load_data(path: str | Path, data_dir: str | None = None) -> TaskData:
    """The data that a checkpoint was trained on, ready to be served.

    Args:
        path: the checkpoint.
        data_dir: where data sets lie by now; default: where the run found them.

    Raises:
        UserError: the checkpoint does not say, or the data are not there, or not the same.
    """
    checkpoint = read_checkpoint(path)
    found = find_class(path, checkpoint, "data", TaskData)  # type: ignore[type-abstract]
    config = yaml.safe_load(checkpoint["config"])
    moved = {} if data_dir is None else {"data_dir": data_dir}
    try:
        data = found(**{**config["data"].get("init_args", {}), "seed": config["seed_everything"], **moved})
    except (KeyError, TypeError) as error:
        raise UserError(f"--ckpt_path {path}: does not fit the {found.__name__} of this version") from error
    data.prepare_data()
    _require_same(path, checkpoint.get("datamodule_hyper_parameters", {}), data.hparams)
    _require_same(path, checkpoint["hyper_parameters"].get("spec", data.spec), data.spec)
    data.setup("validate")
    return data


def find_class(path: str | Path, checkpoint: Mapping[str, Any], section: str, kind: type[Kind]) -> type[Kind]:
    """The class that a section of a checkpoint's configuration names.

    Args:
        path: of the checkpoint, for the error.
        checkpoint: what was read there.
        section: "model" or "data".
        kind: what it must be derived from.

    Raises:
        UserError: there is none, or not of this kind.
    """
    try:
        found = locate(name := str(yaml.safe_load(checkpoint["config"])[section]["class_path"]))
    except (KeyError, TypeError, AttributeError, yaml.YAMLError, ErrorDuringImport) as error:
        raise UserError(f"--ckpt_path {path}: does not say of which task it is, or that cannot be imported") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise UserError(f"--ckpt_path {path}: of a {name}, where a {kind.__name__} is needed")
    return found


def require_same_model(path: str | Path, task: Task) -> dict[str, Any]:
    """The checkpoint, if it is of a model made with these very settings.

    Raises:
        UserError: a setting differs, or the weights have other names or shapes.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint["hyper_parameters"].keys() != task.hparams.keys():
        raise UserError(
            f"--ckpt_path {path}: of another task than {type(task).__name__}: give the run's own config.yaml"
        )
    _require_same(path, checkpoint["hyper_parameters"], task.hparams)
    shapes = {name: tensor.shape for name, tensor in task.state_dict().items()}
    if {name: tensor.shape for name, tensor in checkpoint["state_dict"].items()} != shapes:
        raise UserError(f"--ckpt_path {path}: its weights do not fit a {type(task).__name__} with these settings")
    return checkpoint


def require_same_run(path: str | Path, task: Task, data: TaskData) -> dict[str, Any]:
    """The checkpoint, if training can go on from it exactly: same model, same data, and the optimiser's state.

    Raises:
        UserError: a setting differs, or the checkpoint holds weights only.
    """
    checkpoint = require_same_model(path, task)
    if "optimizer_states" not in checkpoint:
        raise UserError(f"--ckpt_path {path}: holds weights only, training cannot go on from it")
    _require_same(path, checkpoint.get("datamodule_hyper_parameters", {}), data.hparams)
    return checkpoint


def _require_same(path: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            there, here = (_short(settings.get(name)) for settings in (theirs, ours))
            raise UserError(f"--ckpt_path {path}: made with {name}={there}, not {here}: give the run's own config.yaml")


def _short(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
