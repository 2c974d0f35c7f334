"""Loads models from checkpoints as plain data: kvt imports, calls and parses nothing in a file.

A checkpoint names the classes of its task, its data and its attention. kvt uses a class only if the class is part of
kvt, or if the user also names it. kvt checks the types of the checkpoint's settings against the signatures of classes.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch

from kvt.attention import ATTENTION
from kvt.run.checkpoint_files import HPARAMS, read_checkpoint
from kvt.run.sections import KEPT
from kvt.run.settings import SECTIONS
from kvt.system.console import user_error
from kvt.system.errors import UserError, argument_types, require_types
from kvt.system.files import user_path
from kvt.system.quoting import shell_word
from kvt.tasks import Task
from kvt.tasks.base import find_class, known_classes
from kvt.tasks.datamodule import as_recorded

AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file, or a folder of `save_pretrained`: its task, its data and their settings.

    Args:
        path: path of the file or the folder; a run's folder stands for its best checkpoint.
        named: import paths of classes outside kvt that may be imported, by flag: "attn", "model", "data".
        flag: the flag with which the user passed the path, for messages; "" if there is no flag.
    """

    path: str | Path
    named: Mapping[str, str | None] = field(default_factory=dict)
    flag: str = "--ckpt_path"

    def __post_init__(self) -> None:
        if os.path.isfile(best := os.path.join(self.path, "checkpoints", "best.ckpt")):
            object.__setattr__(self, "path", best)

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The content of the checkpoint by Lightning's keys, with the data's settings in the form of `as_recorded`."""
        saved = read_checkpoint(self.path, self._name)
        model, data = (saved[key] for key in HPARAMS.values())
        return {**saved, HPARAMS["data"]: as_recorded(saved.get("data_class"), data, model.get("spec"))}

    @property
    def step(self) -> int:
        """The number of training steps before the checkpoint was saved."""
        return int(self.saved["global_step"])

    @property
    def hparams(self) -> dict[str, Mapping[str, Any]]:
        """The settings of the task, "model", and of its data, "data"."""
        return {section: self.saved[key] for section, key in HPARAMS.items()}

    @cached_property
    def classes(self) -> dict[str, type[Any]]:
        """The class of the task, "model", and the class of its data, "data".

        Raises UserError for a class that is neither part of kvt nor in `named`.
        """
        return {section: self.class_of(section) for section in SECTIONS}

    def load_task(self, kind: type[AnyTask]) -> AnyTask:
        """Return the trained task in eval mode; raise UserError if the task is no `kind`, or its weights do not fit."""
        with self.add_checkpoint_path():
            cls = self.class_of("model")
            if not issubclass(cls, kind):
                raise UserError(f"contains {cls.__name__}; this command needs {kind.__name__}")
            self.require_known_attention()
            task = self.build(cls, self.settings("model", cls) | {"spec": self.spec})
            dtypes = {weight.dtype for weight in self.saved["state_dict"].values() if weight.is_floating_point()}
            # float16, as in the zoo, only makes the file smaller: the model computes in float32
            if kept := dtypes - {torch.float16}:
                task.to(kept.pop())  # float64 after a run with --precision 64-true
            self.load_weights(task)
        return task.eval()

    def settings(self, section: str, cls: type[Any]) -> dict[str, Any]:
        """Return the type-checked arguments of the task or data, without `spec` and without a missing `data_dir`."""
        values = self.hparams[section]
        taken = {name: values[name] for name in argument_types(cls) if name in values and name != "spec"}
        require_types(taken, cls)
        if not os.path.isdir(os.path.expanduser(taken.get("data_dir") or "")):
            taken.pop("data_dir", None)
        return taken

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The Trainer settings in the checkpoint. Raises UserError for a type that the Trainer does not accept."""
        kept = self.saved["trainer"]
        taken = {name: kept[name] for name in KEPT if name in kept}
        require_types(taken, L.Trainer)
        return taken

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The run's optimiser, {"class_path": …, "init_args": …}, if torch.optim has the class, else None.

        The user must name an optimiser of another package again, because kvt imports no class that a file names.
        """
        saved = self.saved.get("optimizer")
        asked: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
        module, _, name = str(asked.get("class_path")).rpartition(".")
        cls = vars(torch.optim).get(name) if module == "torch.optim" else None
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            return None
        settings = asked.get("init_args") or {}
        if not isinstance(settings, Mapping) or settings.keys() - (argument_types(cls).keys() - {"params", "lr"}):
            raise UserError(f"the settings of its optimizer do not fit {name} in this version of torch")
        return {"class_path": f"{module}.{name}", "init_args": {**settings}}

    @property
    def spec(self) -> Any:
        """`TaskData.spec` of the run's data, such as sizes and vocabulary. None if the model needs no `spec`."""
        return self.hparams["model"].get("spec")

    @property
    def continues(self) -> bool:
        """Whether training can continue from the checkpoint. Some checkpoints, as in the zoo, have weights only."""
        return "optimizer_states" in self.saved

    @property
    def resumes(self) -> bool:
        """Whether this version of kvt can resume the run. Checkpoints of older versions lack the run's history."""
        return self.continues and "Recorder" in self.saved.get("callbacks", {})

    def require_known_attention(self, own: str | None = None) -> None:
        """Raise UserError if the checkpoint's attention is outside kvt, and neither `named` nor `own` names it."""
        attn, own = self.hparams["model"].get("attn"), own or self.named.get("attn")
        if own is not None and own != attn:
            remedy = f"pass --attn {shell_word(f'{attn!s:.100}')} or drop it"
            raise self.error(f"made with attn={attn!s:.100}, not {own}: {remedy}")
        if attn is not None and attn != own and not (isinstance(attn, str) and attn in ATTENTION):
            raise self._not_ours("attn", str(attn))

    def load_weights(self, task: Task) -> None:
        """Load the weights into a task; raise UserError if names or shapes do not match, or weights are not finite."""
        try:
            task.load_state_dict(self.saved["state_dict"])
        except RuntimeError as error:
            raise self.error(f"its weights do not fit {type(task).__name__} with these settings") from error
        if not all(weight.isfinite().all() for weight in task.parameters()):  # a buffer may hold −inf
            raise self.error("its weights are not finite, as the run has diverged: use another checkpoint")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the weights and of their names, in hexadecimal."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.saved["state_dict"].items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def trained_on(self) -> str | None:
        """The fingerprint of the run's data, `TaskData.content`. None if the checkpoint has no fingerprint."""
        return self.hparams["data"].get("content")

    def error(self, reason: str) -> UserError:
        """Return a UserError whose message begins with the path of the checkpoint."""
        return UserError(f"{self._name}: {reason}")

    @property
    def _name(self) -> str:
        return f"{self.flag} {self.path}".lstrip()

    @contextmanager
    def add_checkpoint_path(self) -> Iterator[None]:
        """Context manager: add the checkpoint's path to the message if the code inside raises a user's mistake."""
        try:
            yield
        except Exception as error:
            mistake = user_error(error)
            if mistake is None or str(self.path) in mistake:
                raise
            raise self.error(mistake) from None

    def build(self, cls: type[Any], settings: Mapping[str, Any]) -> Any:
        """Return a task, or its data, with these settings; raise UserError if the class rejects a setting."""
        try:
            return cls(**settings)
        except UserError:
            raise
        except Exception as error:  # settings of a damaged checkpoint may raise any exception
            raise self.error(f"does not fit {cls.__name__} of this version ({error!s:.200})") from error

    def class_of(self, section: str) -> type[Any]:
        name, own = self.saved.get(f"{section}_class"), self.named.get(section)
        if not isinstance(name, str):
            what = "task: load it with load_from_checkpoint of its class" if section == "model" else "data"
            raise self.error(f"does not name the class of its {what}")
        if own is not None and own.rpartition(".")[2] != name.rpartition(".")[2]:
            raise self.error(f"contains {name:.100}, not {own}: drop --{section}")
        if name not in known_classes() and name != own:
            raise self._not_ours(section, name)
        return find_class(name, section, SECTIONS[section])

    def _not_ours(self, flag: str, name: str) -> UserError:
        remedy = f"if it is your own code, pass --{flag} {shell_word(f'{name:.100}')}"
        return self.error(f"uses {name:.100}, which is not part of kvt: {remedy}")


def load(checkpoint: str | Path, attn: str | None = None, model: str | None = None) -> Task:
    """Return the trained task in a checkpoint, in eval mode, with its vocabulary.

    A language model has the method `generate(prompt, tokens)`, a translation task has `translate(sentences)`, and a
    classification task has `predict(inputs)`.

    Args:
        checkpoint: path of a file that a run or a plain Lightning Trainer has saved, or of a folder that
            `save_pretrained` has written.
        attn: import path of your own attention class, if the checkpoint uses one: my_attention.NearKV. kvt imports only
            classes that you name.
        model: import path of your own task class, if the checkpoint uses one: my_task.MyTask.

    Raises:
        UserError: the file does not exist, is no checkpoint of a task, or uses a class outside kvt that neither
                `attn` nor `model` names.
    """
    named = {"attn": attn, "model": model}
    return Checkpoint(user_path(checkpoint), named, flag="").load_task(Task)  # type: ignore[type-abstract]
