"""Reads checkpoints as plain data: nothing in one is imported, called or parsed.

A checkpoint names the classes of its task, its data and its attention. They are looked up among kvt's own and those
that the user names too. Its settings are checked against the signatures of these classes, which are called with them.
"""

import inspect
import json
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning as L
import torch
from jsonargparse import Namespace
from torch import Tensor, nn

import kvt.tasks
from kvt.attention import ATTENTION
from kvt.data.tensor_cache import read_only
from kvt.data.tensor_files import load
from kvt.system.console import user_error
from kvt.system.errors import UserError
from kvt.system.memory import WithoutMemory, require_memory
from kvt.system.signatures import argument_types, require_types
from kvt.tasks import Task, TaskData
from kvt.tasks.base import class_name

AnyTask = TypeVar("AnyTask", bound=Task)
Kind = TypeVar("Kind", bound=Task | TaskData)
Named = Mapping[str, str | None]
"""The classes that the user names besides, by flag: "attn", "model", "data"."""

OURS = [cls for cls in vars(kvt.tasks).values() if inspect.isclass(cls) and issubclass(cls, Task | TaskData)]
"""kvt's own task and data classes: those that a checkpoint may name by itself."""
HPARAMS = {"model": "hyper_parameters", "data": "datamodule_hyper_parameters"}
"""Where Lightning keeps the settings of each."""
TRAINER = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps"),
    *("max_time", "min_epochs", "min_steps", "overfit_batches", "precision", "val_check_interval"),
)
"""The Trainer settings that a checkpoint keeps: lengths, limits, precision and gradient clipping."""
MAX_COUNT = 2**31
"""Of all that is counted in a run: steps, epochs, batches."""
LIGHTNING = r"([2-9]|\d\d+)\.\d+(\.\d+)?(\.?(a|b|rc|dev|post)\d*)?"
"""Versions of it that write checkpoints as this one reads them."""


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint in a file: plain data and tensors, as they were written. No code in it is run.

    Raises:
        UserError: there is no such file, or it is no checkpoint of a Lightning module.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, no error where the name is too long
        raise UserError(f"--ckpt_path {path}: no such file; a run keeps its own under checkpoints/")
    require_memory(size := os.path.getsize(path), f"--ckpt_path {path}")
    try:
        checkpoint = _plain(load(Path(path)), iter(range(size)))
        _require_form(checkpoint)
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"--ckpt_path {path}: not a checkpoint of kvt, or a broken one") from error
    return checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file: its task, its data and their settings.

    Args:
        path: of the file.
        named: the classes of their own that the user names.
        kind: what its task must be.
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
        """The task's class; reading it checks the settings and the attention against the weights.

        Raises:
            UserError: it is not of its kind, or neither kvt's nor named by the user, and so for its attention; or
                settings and weights contradict each other.
        """
        found: type[Task] = self._find("model", self.kind)
        settings = self._task_settings(found)
        attn, own = settings.get("attn"), self.named.get("attn")
        if attn is not None and attn not in ATTENTION and attn != own:
            raise self._strange("attn", str(attn))
        if own is not None and own != attn:
            raise self.error(f"made with attn={attn}, not {own}: give the run's own config.yaml")
        if (attn is None or attn in ATTENTION) and class_name(found) == found.__name__:  # others may look at numbers
            with WithoutMemory():
                task = self._call(found, settings)
            self.require_fitting(task)
        return found

    @cached_property
    def data_class(self) -> type[TaskData]:
        """The class of its data.

        Raises:
            UserError: it is neither kvt's nor named by the user.
        """
        found: type[TaskData] = self._find("data", TaskData)
        return found

    def load_task(self) -> Task:
        """The trained task, in eval mode.

        Raises:
            UserError: see `task_class`.
        """
        task = self._call(self.task_class, self._task_settings(self.task_class))
        self.load_weights(task)
        return task.eval()

    def load_data(self, **given: Any) -> TaskData:
        """The data of the run, ready to be served: read where the user says, or where the run found them.

        Args:
            given: settings that the user gives instead, such as `data_dir`.

        Raises:
            UserError: the data are not there, or not the same.
        """
        with self.blamed(), self.reading("data_dir" in given):
            data = self._call(self.data_class, self.settings(self.data_class) | given)
            data.prepare_data()
            self.require_same_data(data)
            data.setup("validate")
        return data

    def settings(self, cls: type[Task | TaskData]) -> dict[str, Any]:
        """The constructor arguments of its task or data, checked against the types in the class's signature.

        A data folder that this machine does not have is left out.

        Raises:
            UserError: a type is another.
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
        """The Trainer settings kept in the checkpoint, their types checked against the Trainer's signature.

        Raises:
            UserError: one is of another type than the Trainer's.
        """
        kept = self.content.get("trainer", {})
        with self.blamed():
            if not isinstance(kept, Mapping):
                raise UserError("keeps no settings of the Trainer")
            taken = {name: kept[name] for name in TRAINER if name in kept}
            require_types(taken, L.Trainer)
        return taken

    def fill(self, settings: Namespace, given: Collection[str]) -> None:
        """Overwrites command line settings that the user does not give with the checkpoint's values.

        Args:
            settings: of a command line, by section: seed_everything, model, data, trainer.
            given: names of those that the user gives, such as "data.batch_size": they stay.
        """
        classes: dict[str, type[Task | TaskData]] = {"model": self.task_class, "data": self.data_class}
        for section, cls in classes.items():
            values = self.settings(cls)
            values |= {name: value for name, value in vars(settings[section]).items() if f"{section}.{name}" in given}
            class_path = f"{cls.__module__}.{cls.__qualname__}"
            settings[section] = Namespace(class_path=class_path, init_args=Namespace(**values))
        for name, value in self.trainer_settings.items():
            if f"trainer.{name}" not in given:
                settings.trainer[name] = value
        data = settings.data.init_args
        if "seed_everything" not in given and "seed" in data:
            settings.seed_everything = data.seed
        data.seed = settings.seed_everything

    def reading(self, data_dir_is_given: bool) -> AbstractContextManager[None]:
        """Context manager: makes the data folder read-only if the checkpoint, not the user, names it."""
        return read_only() if self._data_dir_is_here and not data_dir_is_given else nullcontext()

    def load_weights(self, task: Task) -> None:
        """Loads the weights into a task.

        Raises:
            UserError: they are not those of such a task.
        """
        self.require_fitting(task)
        task.load_state_dict(self.content["state_dict"])

    def require_fitting(self, task: Task) -> None:
        """Raises UserError if its weights have other names or shapes than those of a task."""

        def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
            return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in state.items()}

        if forms(self.content["state_dict"]) != forms(task.state_dict()):
            raise self.error(f"its weights do not fit a {type(task).__name__} with these settings")

    def require_same_model(self, task: Task) -> None:
        """Raises UserError if a setting differs from a task's, or the weights have other names or shapes."""
        if self.content["hyper_parameters"].keys() != task.hparams.keys():
            raise self.error(f"of another task than {type(task).__name__}: give the run's own config.yaml")
        self._require_same(self.content["hyper_parameters"], task.hparams)
        self.require_fitting(task)

    def require_same_data(self, data: TaskData) -> None:
        """Raises UserError if the settings, content or `spec` of data differ; where they lie may differ."""
        theirs = {k: v for k, v in self.content["datamodule_hyper_parameters"].items() if k not in data.path_settings}
        ours = {name: value for name, value in data.hparams.items() if name not in data.path_settings}
        self._require_same(theirs, ours)
        self._require_same({"spec": self.content["hyper_parameters"].get("spec", data.spec)}, {"spec": data.spec})

    def require_same_run(self, task: Task, data: TaskData) -> None:
        """Raises UserError if training cannot go on from it exactly: another model, other data, or weights alone."""
        self.require_same_model(task)
        if "optimizer_states" not in self.content:
            raise self.error("holds weights only, training cannot go on from it")
        self.require_same_data(data)

    def error(self, reason: str) -> UserError:
        """Returns a UserError whose message begins with the path of the checkpoint."""
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

    @property
    def _data_dir_is_here(self) -> bool:
        folder = self.content["datamodule_hyper_parameters"].get("data_dir")
        return isinstance(folder, str) and os.path.isdir(os.path.expanduser(folder))

    def _find(self, section: str, kind: type[Any]) -> type[Any]:
        """Looks up the class that the checkpoint names, among kvt's own, `kind` and those that the user names."""
        name, own = self.content.get(f"{section}_class"), self.named.get(section)
        if not isinstance(name, str):
            raise self.error("does not say of which task it is")
        known = {class_name(cls): cls for cls in (*OURS, kind) if not inspect.isabstract(cls)}
        if own is not None and own.rpartition(".")[2] != name.rpartition(".")[2]:
            raise self.error(f"of a {name:.100}, not {own}: leave --{section} out")
        if name not in known and name != own:
            raise self._strange(section, name)
        found = known[name] if name in known else self._import(name)
        if not (inspect.isclass(found) and issubclass(found, kind)):
            raise self.error(f"of a {name:.100}, where a {kind.__name__} is needed")
        return found

    def _import(self, name: str) -> Any:
        module, _, attribute = name.rpartition(".")
        try:
            return getattr(import_module(module), attribute)
        except Exception as error:  # a user's own code raises anything
            raise self.error(f"of a {name:.100}, which cannot be imported: {error!s:.200}") from error

    def _strange(self, flag: str, name: str) -> UserError:
        remedy = f"if that is your own code, add --{flag} {name:.100}"
        return self.error(f"uses {name:.100}, which is not part of kvt: {remedy}")

    def _task_settings(self, cls: type[Task]) -> dict[str, Any]:
        values = self.content["hyper_parameters"]
        spec = {"spec": values["spec"]} if "spec" in values and "spec" in argument_types(cls) else {}
        return spec | self.settings(cls)

    def _call(self, cls: type[Kind], settings: Mapping[str, Any]) -> Kind:
        try:
            return cls(**settings)
        except UserError as error:
            raise self.error(str(error)) from None
        except Exception as error:  # settings that no run has had raise nearly anything
            raise self.error(f"does not fit the {cls.__name__} of this version ({error!s:.200})") from error

    def _require_same(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                there, here = (_short(settings.get(name)) for settings in (theirs, ours))
                raise self.error(f"made with {name}={there}, not {here}: give the run's own config.yaml")


def load_task(path: str | Path, kind: type[AnyTask], named: Named = {}) -> AnyTask:  # noqa: B006 (only read)
    """The trained task in a checkpoint, in eval mode.

    Its class is kvt's, the given one, or one that is named; its attention is kvt's or named.

    Raises:
        UserError: there is no such task in the file.
    """
    return cast(AnyTask, Checkpoint(path, named, kind).load_task())


def load_data(path: str | Path, named: Named = {}, **given: Any) -> TaskData:  # noqa: B006 (only read)
    """The data that a checkpoint was trained on, ready to be served.

    Args:
        path: of the checkpoint.
        named: the classes of their own that the user names.
        given: settings of the data in place of the run's, such as `data_dir`.

    Raises:
        UserError: the data are not there, or not the same.
    """
    return Checkpoint(path, named).load_data(**given)


def _plain(value: Any, budget: Iterator[int]) -> Any:
    """A copy of plain data and tensors, which says no more things than the file has bytes: none over and over again."""
    if next(budget, None) is None:
        raise ValueError("it repeats itself")
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, part in dict.items(value):
            if not isinstance(key, str | int):
                raise TypeError("a key that is no name")
            copy[key] = _plain(part, budget)
        return copy
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_plain(part, budget) for part in value)
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or vars(value) or not _is_dense(value):
            raise TypeError("a tensor without values, or more than a tensor")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(f"a {type(value)}")
    return value


def _is_dense(tensor: Tensor) -> bool:
    return not (tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def _require_form(checkpoint: dict[str, Any]) -> None:
    """Makes sure of what every checkpoint of a task says, but for what only training goes on with."""
    sections = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters")
    checkpoint.setdefault(sections[2], {})
    counts = (checkpoint["epoch"], checkpoint["global_step"])
    json.dumps([checkpoint[name] for name in sections[1:]])  # settings: plain data
    if not (
        all(isinstance(checkpoint[name], Mapping) for name in sections)
        and all(isinstance(value, Tensor) for value in checkpoint["state_dict"].values())
        and all(isinstance(key, str) for key in chain.from_iterable(checkpoint[name] for name in sections))
        and all(isinstance(count, int) and 0 <= count < MAX_COUNT for count in counts)
        and re.fullmatch(LIGHTNING, checkpoint["pytorch-lightning_version"])
    ):
        raise TypeError


def _short(value: Any, limit: int = 60) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
