"""Loads models from checkpoints. A checkpoint is read as plain data, so that no code in the file runs.

A checkpoint names the classes of its task, its data and its attention. kvt imports a class only if the class is part
of kvt or torch.optim, or if the user also names the class.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import torch
import yaml
from safetensors.torch import load as read_safetensors

from kvt.attention import ATTENTION
from kvt.data.tensor_files import read_tensors
from kvt.run.folder import BEST
from kvt.run.sections import BUILT, TRAINER, Config
from kvt.system import UserError, arguments, user_path
from kvt.tasks import Task, TaskData
from kvt.tasks.base import MODEL, SETTINGS, known_classes
from kvt.tasks.datamodule import section_class

AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a task: a file, or a folder that `save_pretrained` has written.

    Args:
        path: path of the file or the folder; a run's folder stands for its best checkpoint.
        named: maps "attn", "model" or "data" to None, or to the import path of a class outside kvt that kvt may import.
    """

    path: str | Path
    named: Mapping[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if os.path.isfile(best := os.path.join(self.path, BEST)):
            object.__setattr__(self, "path", best)

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The content of the checkpoint: a dict with Lightning's keys, and keys of kvt such as "config"."""
        return read_checkpoint(self.path)

    def section(self, name: str) -> dict[str, Any]:
        """Return {"class_path": …, "init_args": …} of the task (name "model") or of the data (name "data").

        If a setting in `TaskData.measured` is None, it gets the value that the run has measured. A `data_dir` that does
        not exist is left out. Raises UserError if the checkpoint lacks the section, if its class or attention is
        neither part of kvt nor in `named`, if the class in `named` has another name, or if a setting names a class.
        """
        part, own = self.saved["config"].get(name), self.named.get(name)
        if part is None:
            raise self.error(f"has no settings of its {name}: pass a task's YAML, such as --config cifar10")
        path, settings = str(part["class_path"]), {**part["init_args"]}
        if own is not None and own.rpartition(".")[2] != path.rpartition(".")[2]:
            raise self.error(f"contains {path:.100}, not {own}: drop --{name}")
        if not (path == own or (path.startswith("kvt.") and path.rpartition(".")[2] in known_classes())):
            raise self._not_ours(name, path)
        attn, own = settings.get("attn"), self.named.get("attn")
        ours = attn is None or attn == own or (isinstance(attn, str) and attn in ATTENTION)
        if name == "model" and not ours:
            raise self._not_ours("attn", str(attn))
        if not _is_plain(settings):
            raise self.error(f"names a class in its settings of {name}: pass the settings by --config")
        if name == "data":
            measured = section_class("data", path).measured
            settings |= {key: self.spec[key] for key in measured if settings.get(key) is None and key in self.spec}
        if not os.path.isdir(os.path.expanduser(str(settings.get("data_dir") or ""))):
            settings.pop("data_dir", None)
        return {"class_path": path, "init_args": settings}

    @property
    def config(self) -> Config:
        """The configuration of the run: task, data, seed, optimiser, and the settings in `TRAINER`.

        It lacks the accelerator. It also lacks callbacks, and an optimiser that is not from torch.optim or has an
        argument that names a class, because a checkpoint alone must not make kvt import them.
        """
        saved, sections = self.saved["config"], {name: self.section(name) for name in BUILT}
        read = {name.removeprefix("trainer.") for name in TRAINER} - {"accelerator", "callbacks"}
        trainer = {name: value for name, value in (saved.get("trainer") or {}).items() if name in read}
        asked = saved.get("optimizer") or {}
        is_torchs = str(asked.get("class_path")).rpartition(".")[0] == "torch.optim"
        optimizer = asked if is_torchs and _is_plain(asked.get("init_args")) else None
        return {**sections, "trainer": trainer, "seed_everything": self.seed, "optimizer": optimizer}

    def load_task(self, kind: type[AnyTask]) -> AnyTask:
        """Return the task, with its trained weights, in eval mode.

        Raises UserError if `section` does, if the task is no instance of `kind`, or if the weights do not fit.
        """
        task = self._make("model", {}, spec=self.spec)
        if not isinstance(task, kind):
            raise self.error(f"contains {type(task).__name__}; this command needs {kind.__name__}")
        dtypes = {weight.dtype for weight in self.saved["state_dict"].values() if weight.is_floating_point()}
        # float16, as in the folder zoo, only makes the file smaller: the model computes in float32
        if kept := dtypes - {torch.float16}:
            task.to(kept.pop())  # such as float64 after --precision 64-true
        self.load_weights(task)
        return task.eval()

    def load_data(self, **given: Any) -> TaskData:
        """Return the data of the checkpoint's run, set up for validation. `given` replaces settings of the data.

        Raises UserError if `section` does, or if the data differ from those of the run.
        """
        data: TaskData = self._make("data", given, seed=self.seed)
        data.prepare_data()
        data.setup("validate")
        self.require_same_data(data)
        return data

    @property
    def seed(self) -> int:
        """The seed of the run; 0 if the checkpoint has no seed."""
        return self.saved["config"].get("seed_everything", 0)

    @property
    def spec(self) -> Any:
        """`TaskData.spec` of the run's data, such as sizes and vocabulary. None if the model needs no `spec`."""
        return self.saved["hyper_parameters"].get("spec")

    @property
    def continues(self) -> bool:
        """Whether training can continue from the checkpoint; False if the checkpoint has only weights."""
        return "optimizer_states" in self.saved

    def load_weights(self, task: Task) -> None:
        """Load the weights into a task; raise UserError if names or shapes do not match."""
        try:
            task.load_state_dict(self.saved["state_dict"])
        except RuntimeError as error:
            raise self.error(f"its weights do not fit {type(task).__name__} with these settings") from error

    @property
    def trained_on(self) -> str | None:
        """The fingerprint of the run's data, `TaskData.content`. None if the checkpoint has no fingerprint."""
        return self.saved.get("datamodule_hyper_parameters", {}).get("content")

    def require_same(self, config: Config, sections: Sequence[str], free: Collection[str] = ()) -> None:
        """Raise UserError if `config` and the checkpoint differ in the seed, or in a class or setting in `sections`.

        Settings that only one of them has are not compared. `free` has the names of settings that may differ.
        """
        for section in (one for one in sections if one in self.saved["config"]):
            parts = [whole.get(section) or {} for whole in (self.saved["config"], config)]
            theirs, ours = ({section: part.get("class_path"), **part.get("init_args", {})} for part in parts)
            theirs["seed"], ours["seed"] = self.seed, config["seed_everything"]
            for name in [name for name in theirs if name in ours and name not in free]:
                if theirs[name] != ours[name]:
                    made = f"made with {name}={theirs[name]!s:.60}, not {ours[name]!s:.60}"
                    raise self.error(f"{made}: keep the run's own setting")

    def require_same_data(self, data: TaskData, content: bool = True) -> None:
        """Raise UserError if data and model differ in `spec`. With `content`, also raise if the run had other data."""
        for name in {*(self.spec or {}), *data.spec} if self.spec is not None else ():
            if self.spec.get(name) != data.spec.get(name):
                raise self.error(f"made with another {name}: name the run's own data, or start a new run")
        if content and self.trained_on not in (None, data.content):
            raise self.error("its run was trained on other data: name the run's own data, or start a new run")

    def error(self, reason: str) -> UserError:
        """Return a UserError whose message begins with the path of the checkpoint."""
        return UserError(f"{self.path}: {reason}")

    def _make(self, section: str, given: Mapping[str, Any], **of_run: Any) -> Any:
        part = self.section(section)
        cls = section_class(section, part["class_path"])
        return cls(**part["init_args"] | given, **{name: of_run[name] for name in of_run if name in arguments(cls)})

    def _not_ours(self, flag: str, name: str) -> UserError:
        remedy = f"if it is your own code, pass --{flag} {quote(f'{name:.100}')}"
        return self.error(f"uses {name:.100}, which is not part of kvt: {remedy}")


def _is_plain(value: Any) -> bool:
    """Return whether parsing `value` imports no class: no dict has "class_path", no text is a dict or list in YAML."""
    if isinstance(value, str):
        with suppress(yaml.YAMLError, ValueError):
            return not isinstance(yaml.safe_load(value), dict | list)
        return True
    parts = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return not (isinstance(value, dict) and "class_path" in value) and all(map(_is_plain, parts))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the plain data and tensors in a file, or in a folder that `save_pretrained` has written.

    Raises UserError if the path holds no checkpoint of a task of kvt, or holds a checkpoint of kvt 0.1.
    """
    is_folder = os.path.isfile(os.path.join(path, SETTINGS))
    if not is_folder and not os.path.isfile(path):  # not Path.is_file, which raises if the path is too long
        raise UserError(f"{path}: no such file; the checkpoints of a run are in RUN/checkpoints/")
    try:
        checkpoint: dict[str, Any] = _read_folder(Path(path)) if is_folder else read_tensors(Path(path))
        found = {*checkpoint}
    except Exception as error:  # a damaged pickle may raise any exception
        raise UserError(f"{path}: not a checkpoint, or a damaged one") from error
    if "model_class" in found and "config" not in found:
        raise UserError(f"{path}: made by version 0.1 of kvt: commit c47a6d85 reads it")
    if not {"state_dict", "global_step", "hyper_parameters", "config"} <= found:
        remedy = "load the checkpoint of another LightningModule with load_from_checkpoint of its class"
        raise UserError(f"{path}: not a checkpoint of kvt; {remedy}")
    return checkpoint


def _read_folder(path: Path) -> dict[str, Any]:
    settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    stored = read_safetensors((path / MODEL).read_bytes())
    tied = {name: stored[other] for name, other in settings["tied"].items()}
    return {"epoch": 0, "global_step": 0, **settings, "state_dict": stored | tied}


def load(checkpoint: str | Path, attn: str | None = None, model: str | None = None) -> Task:
    """Return the trained task in a checkpoint, in eval mode.

    A language model has the method `generate(prompt, tokens)`, a translation task has `translate(sentences)`, and a
    classification task has `predict(inputs)`.

    Args:
        checkpoint: path of a file that a run or a plain Lightning Trainer has saved; of a folder that
            `save_pretrained` has written; or of a run's folder, which stands for the run's best checkpoint.
        attn: import path of your attention class, such as my_attention.NearKV, if the checkpoint uses one. Of the
            classes outside kvt, kvt imports only those that you name.
        model: import path of your task class, such as my_task.MyTask, if the checkpoint uses one.

    Raises:
        UserError: the file does not exist, is no checkpoint of a task, or uses a class outside kvt that neither
                `attn` nor `model` names.
    """
    named = {"attn": attn, "model": model}
    return Checkpoint(user_path(checkpoint), named).load_task(Task)  # type: ignore[type-abstract]
