"""Reads checkpoints as plain data: nothing in one is imported, called or parsed.

A checkpoint names the classes of its task, its data and its attention. They are looked up among kvt's own and those
that the user names too. Its settings are checked against the signatures of these classes.
"""

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning as L
import torch
from torch import Tensor

import kvt.tasks
from kvt.attention import ATTENTION
from kvt.data.tensor_files import read_only, read_tensors
from kvt.system.console import user_error
from kvt.system.errors import UserError, argument_types, require_types, unknown
from kvt.system.hardware import require_memory
from kvt.tasks import Task, TaskData
from kvt.tasks.base import class_name

AnyTask = TypeVar("AnyTask", bound=Task)
Named = Mapping[str, str | None]
"""The classes of their own that the user names, by flag: "attn", "model", "data"."""

OURS = {cls.__name__: cls for cls in vars(kvt.tasks).values() if inspect.isclass(cls) and not inspect.isabstract(cls)}
"""kvt's own task and data classes by name: those that a checkpoint may name by itself."""
HPARAMS = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters"}
"""The keys under which Lightning saves the settings."""
TRAINER = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps"),
    *("max_time", "min_epochs", "min_steps", "overfit_batches", "precision", "val_check_interval"),
)
"""The Trainer settings that a checkpoint keeps: lengths, limits, precision and gradient clipping."""


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the plain data and tensors in a checkpoint file.

    Raises:
        UserError: there is no such file, or it is no checkpoint of a Lightning module.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, returns False for a name that is too long
        raise UserError(f"--ckpt_path {path}: no such file; a run keeps its own under checkpoints/")
    require_memory(os.path.getsize(path), f"--ckpt_path {path}")
    try:
        checkpoint: dict[str, Any] = read_tensors(Path(path))
        checkpoint.setdefault(HPARAMS["data"], {})
        for key in ("state_dict", *HPARAMS.values()):
            if not (isinstance(checkpoint[key], Mapping) and all(isinstance(name, str) for name in checkpoint[key])):
                raise TypeError(key)
        json.dumps([checkpoint[key] for key in HPARAMS.values()])  # settings are plain data
        weights = all(isinstance(value, Tensor) for value in checkpoint["state_dict"].values())
        if not (weights and all(isinstance(checkpoint[key], int) for key in ("epoch", "global_step"))):
            raise TypeError("weights or progress")
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"--ckpt_path {path}: not a checkpoint of kvt, or a broken one") from error
    return checkpoint


def find_class(name: str, flag: str, base: type[Any]) -> type[Any]:
    """Return kvt's class of that name, or the user's class of that import path.

    Raises:
        UserError: there is no such class, or it is not derived from `base`.
    """
    known = [ours for ours, cls in OURS.items() if issubclass(cls, base)]
    bare = name.rpartition(".")[2] if name.startswith("kvt.") else name
    if bare in known:
        return OURS[bare]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise unknown(f"--{flag}", name, [*known, "my_package.my_module.MyClass"])
    try:
        found = getattr(import_module(module_name), attribute, None)
    except (ImportError, ValueError, TypeError) as error:
        raise UserError(f"--{flag} {name:.100}: cannot be imported: {error!s:.200}") from error
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise UserError(f"--{flag} {name:.100}: {module_name:.100} has no {base.__name__} of this name")
    return found


def import_path(cls: type[Any]) -> str:
    """Return the import path of a task or data class, as YAML files name it."""
    return f"kvt.tasks.{cls.__name__}" if cls in OURS.values() else f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file: its task, its data and their settings.

    Args:
        path: of the file.
        named: the classes of their own that the user names.
        kind: the class that its task must be derived from.
    """

    path: str | Path
    named: Named = field(default_factory=dict)
    kind: type[Task] = Task  # type: ignore[type-abstract]

    @cached_property
    def content(self) -> dict[str, Any]:
        """The plain data in the file, read once."""
        return read_checkpoint(self.path)

    @cached_property
    def task_class(self) -> type[Task]:
        """The task's class. Raises UserError if it is not derived from `kind`, or neither kvt's nor named."""
        found: type[Task] = self._find("model", self.kind)
        return found

    @cached_property
    def data_class(self) -> type[TaskData]:
        """The class of its data. Raises UserError if it is neither kvt's nor named."""
        found: type[TaskData] = self._find("data", TaskData)
        return found

    def load_task(self) -> Task:
        """Return the trained task, in eval mode.

        Raises:
            UserError: a class is neither kvt's nor named, or settings and weights contradict each other.
        """
        self.require_known_attention()
        spec = self.content[HPARAMS["model"]].get("spec")
        task = cast(Task, self.build(self.task_class, self.settings(self.task_class) | {"spec": spec}))
        self.load_weights(task)
        return task.eval()

    def load_data(self, **given: Any) -> TaskData:
        """Return the data of the run, set up for validation.

        Args:
            given: settings in place of the run's, such as `data_dir`.

        Raises:
            UserError: the data are not there, or not the same.
        """
        with self.blamed(), self.reading("data_dir" in given):
            data = cast(TaskData, self.build(self.data_class, self.settings(self.data_class) | given))
            data.prepare_data()
            self.require_same_data(data)
            data.setup("validate")
        return data

    def settings(self, cls: type[Task | TaskData]) -> dict[str, Any]:
        """Return the arguments of its task or data, checked against the types in the class's signature.

        Without `spec`, and without a data folder that this machine does not have.

        Raises:
            UserError: a value is of another type.
        """
        values = self.content[HPARAMS["data" if issubclass(cls, TaskData) else "model"]]
        with self.blamed():
            taken = {name: values[name] for name in argument_types(cls) if name in values and name != "spec"}
            require_types(taken, cls)
        if not self._data_dir_is_here:
            taken.pop("data_dir", None)
        return taken

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The Trainer settings that it keeps, checked against the Trainer's signature.

        Raises:
            UserError: a value is of another type.
        """
        kept = self.content.get("trainer", {})
        with self.blamed():
            if not isinstance(kept, Mapping):
                raise UserError("keeps no settings of the Trainer")
            taken = {name: kept[name] for name in TRAINER if name in kept}
            require_types(taken, L.Trainer)
        return taken

    def reading(self, data_dir_is_given: bool) -> AbstractContextManager[None]:
        """Context manager: makes the data folder read-only if the checkpoint, not the user, names it."""
        return read_only() if self._data_dir_is_here and not data_dir_is_given else nullcontext()

    def require_known_attention(self, own: str | None = None) -> None:
        """Raise UserError if its attention is neither kvt's nor named, here or by `own`."""
        attn, own = self.content[HPARAMS["model"]].get("attn"), own or self.named.get("attn")
        if own is not None and own != attn:
            raise self.error(f"made with attn={attn!s:.100}, not {own}: give --attn {attn!s:.100} or leave it out")
        if attn is not None and attn != own and not (isinstance(attn, str) and attn in ATTENTION):
            raise self._strange("attn", str(attn))

    def load_weights(self, task: Task) -> None:
        """Load the weights into a task. Raises UserError if they have other names or shapes."""

        def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
            return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in state.items()}

        if forms(self.content["state_dict"]) != forms(task.state_dict()):
            raise self.error(f"its weights do not fit a {type(task).__name__} with these settings")
        task.load_state_dict(self.content["state_dict"])

    def require_same_model(self, task: Task) -> None:
        """Raise UserError if a setting differs from a task's."""
        if self.content[HPARAMS["model"]].keys() != task.hparams.keys():
            raise self.error(f"of another task than {type(task).__name__}: give the run's own config.yaml")
        self._require_same(self.content[HPARAMS["model"]], task.hparams)

    def require_same_data(self, data: TaskData) -> None:
        """Raise UserError if the settings, content or `spec` of data differ; where they lie may differ."""
        theirs = {k: v for k, v in self.content[HPARAMS["data"]].items() if k not in data.path_settings}
        ours = {name: value for name, value in data.hparams.items() if name not in data.path_settings}
        self._require_same(theirs, ours)
        self._require_same({"spec": self.content[HPARAMS["model"]].get("spec", data.spec)}, {"spec": data.spec})

    def require_same_run(self, task: Task, data: TaskData) -> None:
        """Raise UserError if training cannot go on from it: another model, other data, or weights alone."""
        self.require_same_model(task)
        if "optimizer_states" not in self.content:
            raise self.error("holds weights only, training cannot go on from it")
        self.require_same_data(data)

    def error(self, reason: str) -> UserError:
        """Return a UserError whose message begins with the path of the checkpoint."""
        return UserError(f"--ckpt_path {self.path}: {reason}")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Context manager: adds the path of the checkpoint to a user's mistake that is raised inside."""
        try:
            yield
        except Exception as error:
            mistake = user_error(error)
            if mistake is None or str(self.path) in mistake:
                raise
            raise self.error(mistake) from None

    def build(self, cls: type[Any], settings: Mapping[str, Any]) -> Task | TaskData:
        """Return a task or its data with these settings. Raises UserError if the class does not take them."""
        try:
            made: Task | TaskData = cls(**settings)
        except UserError as error:
            raise self.error(str(error)) from None
        except Exception as error:  # settings that no run has had raise nearly anything
            raise self.error(f"does not fit the {cls.__name__} of this version ({error!s:.200})") from error
        return made

    @property
    def _data_dir_is_here(self) -> bool:
        folder = self.content[HPARAMS["data"]].get("data_dir")
        return isinstance(folder, str) and os.path.isdir(os.path.expanduser(folder))

    def _find(self, section: str, kind: type[Any]) -> type[Any]:
        name, own = self.content.get(f"{section}_class"), self.named.get(section)
        if not isinstance(name, str):
            raise self.error("does not say of which task it is")
        if own is not None and own.rpartition(".")[2] != name.rpartition(".")[2]:
            raise self.error(f"of a {name:.100}, not {own}: leave --{section} out")
        known = OURS | ({} if inspect.isabstract(kind) else {class_name(kind): kind})
        if name not in known and name != own:
            raise self._strange(section, name)
        found = known.get(name) or find_class(name, section, kind)
        if not issubclass(found, kind):
            raise self.error(f"of a {name:.100}, where a {kind.__name__} is needed")
        return found

    def _strange(self, flag: str, name: str) -> UserError:
        remedy = f"if that is your own code, add --{flag} {name:.100}"
        return self.error(f"uses {name:.100}, which is not part of kvt: {remedy}")

    def _require_same(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                there, here = (f"{settings.get(name)!s:.60}" for settings in (theirs, ours))
                raise self.error(f"made with {name}={there}, not {here}: give the run's own config.yaml")


def load(checkpoint: str | Path, attn: str | None = None, model: str | None = None) -> Task:
    """Return the trained task in a checkpoint, in eval mode, with its vocabulary.

    A task of characters or numbers has `generate(prompt, tokens)`, one of translation `translate(sentences)`, every
    classification `predict(inputs)`.

    Args:
        checkpoint: a file that a run, or a plain Lightning Trainer, has saved.
        attn: the import path of your own attention that the checkpoint uses, my_attention.NearKV: it is imported only
            if you name it.
        model: likewise a task of your own, my_task.MyTask.

    Raises:
        UserError: there is no such file, it is no checkpoint of a task, or it uses code that is not named.
    """
    return Checkpoint(checkpoint, {"attn": attn, "model": model}).load_task()


def load_task(path: str | Path, kind: type[AnyTask], named: Named = {}) -> AnyTask:  # noqa: B006 (only read)
    """Return the trained task in a checkpoint, in eval mode.

    Args:
        path: of the checkpoint.
        kind: the class that its task must be derived from.
        named: the classes of their own that the user names.

    Raises:
        UserError: there is no such task in the file.
    """
    return cast(AnyTask, Checkpoint(path, named, kind).load_task())


def load_data(path: str | Path, named: Named = {}, **given: Any) -> TaskData:  # noqa: B006 (only read)
    """Return the data that a checkpoint was trained on: see `Checkpoint.load_data`."""
    return Checkpoint(path, named).load_data(**given)
