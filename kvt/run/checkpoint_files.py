"""Reads checkpoints and folders of `save_pretrained` as plain data: kvt imports and calls nothing in a file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_weights
from torch import Tensor

from kvt.data.tensor_files import read_tensors
from kvt.system.errors import UserError
from kvt.system.files import regular
from kvt.tasks.base import MODEL, SETTINGS

HPARAMS = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters"}
"""The keys under which Lightning saves the settings of task ("model") and data."""


def read_checkpoint(path: str | Path, name: str | None = None) -> dict[str, Any]:
    """Return the plain data and tensors in a file, or in a folder that `save_pretrained` has written.

    Raises:
        UserError: the path holds no checkpoint of a Lightning module. The message begins with `name`, or with the path
            if `name` is None.
    """
    name = name or str(path)
    is_folder = os.path.isfile(os.path.join(path, SETTINGS))
    if not is_folder and not os.path.isfile(path):  # not Path.is_file, which raises if the path is too long
        raise UserError(f"{name}: no such file; the checkpoints of a run are in RUN/checkpoints/")
    try:
        checkpoint: dict[str, Any] = _read_folder(Path(path)) if is_folder else read_tensors(Path(path))
        for key in (HPARAMS["data"], "trainer"):
            checkpoint.setdefault(key, {})
        for key in ("state_dict", *HPARAMS.values(), "trainer"):
            if not (isinstance(checkpoint[key], Mapping) and all(isinstance(name, str) for name in checkpoint[key])):
                raise TypeError(key)
        json.dumps([checkpoint[key] for key in HPARAMS.values()])  # raises unless the settings are plain data
        weights = all(isinstance(value, Tensor) for value in checkpoint["state_dict"].values())
        spec = isinstance(checkpoint[HPARAMS["model"]].get("spec"), Mapping | None)
        if not (weights and spec and all(isinstance(checkpoint[key], int) for key in ("epoch", "global_step"))):
            raise TypeError("weights, spec or progress")
    except UserError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        remedy = "load the checkpoint of another LightningModule with load_from_checkpoint of its class"
        raise UserError(f"{name}: not a kvt checkpoint, or a damaged one; {remedy}") from error
    return checkpoint


def _read_folder(path: Path) -> dict[str, Any]:
    settings = json.loads(regular(path / SETTINGS).read_text(encoding="utf-8"))
    stored = load_weights(regular(path / MODEL).read_bytes())
    tied = {name: stored[other] for name, other in settings["tied"].items()}
    return {"epoch": 0, "global_step": 0, **settings, "state_dict": stored | tied}
