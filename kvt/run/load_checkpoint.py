"""Reads checkpoints as plain data: nothing in one is imported, called or parsed.

A checkpoint names the classes of its task, its data and its attention. They are looked up among kvt's own and those
that the user names too. Its settings are checked against the signatures of these classes.
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
    """A checkpoint file, or a folder of `kvt export`: its task, its data and their settings.

    Args:
        path: of the file or folder; of a run's folder, its best checkpoint.
        named: import paths of classes outside kvt that may be imported, by flag: "attn", "model", "data".
        flag: the one that takes its path from the user, for messages; "" if none does.
    """

    path: str | Path
    named: Mapping[str, str | None] = field(default_factory=dict)
    flag: str = "--ckpt_path"

    def __post_init__(self) -> None:
        if os.path.isfile(best := os.path.join(self.path, "checkpoints", "best.ckpt")):
            object.__setattr__(self, "path", best)

    @cached_property
    def saved(self) -> dict[str, Any]:
        """What the Trainer has saved, by Lightning's keys, but for settings of data in their recorded form."""
        saved = read_checkpoint(self.path, self._name)
        model, data = (saved[key] for key in HPARAMS.values())
        return {**saved, HPARAMS["data"]: as_recorded(saved.get("data_class"), data, model.get("spec"))}

    @property
    def step(self) -> int:
        """After how many steps of training it was saved."""
        return int(self.saved["global_step"])

    @property
    def hparams(self) -> dict[str, Mapping[str, Any]]:
        """The settings of the task and its data, by section."""
        return {section: self.saved[key] for section, key in HPARAMS.items()}

    @cached_property
    def classes(self) -> dict[str, type[Any]]:
        """The classes of the task and its data, by section. Raises UserError if one is neither kvt's nor named."""
        return {section: self.class_of(section) for section in SECTIONS}

    def load_task(self, kind: type[AnyTask]) -> AnyTask:
        """Return the trained task, in eval mode; raise UserError if it is no `kind` or its weights do not fit."""
        with self.add_checkpoint_path():
            cls = self.class_of("model")
            if not issubclass(cls, kind):
                raise UserError(f"contains {cls.__name__}; this command needs {kind.__name__}")
            self.require_known_attention()
            task = self.build(cls, self.settings("model", cls) | {"spec": self.spec})
            dtypes = {weight.dtype for weight in self.saved["state_dict"].values() if weight.is_floating_point()}
            if kept := dtypes - {torch.float16}:  # which saves space, as in the zoo, and is not computed with
                task.to(kept.pop())  # of a run with --precision 64-true, float64
            self.load_weights(task)
        return task.eval()

    def settings(self, section: str, cls: type[Any]) -> dict[str, Any]:
        """Return the arguments of its task or data, type-checked, without `spec` and a data folder that is not here."""
        values = self.hparams[section]
        taken = {name: values[name] for name in argument_types(cls) if name in values and name != "spec"}
        require_types(taken, cls)
        if not os.path.isdir(os.path.expanduser(taken.get("data_dir") or "")):
            taken.pop("data_dir", None)
        return taken

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The Trainer settings that it keeps. Raises UserError if one has a type that the Trainer does not take."""
        kept = self.saved["trainer"]
        taken = {name: kept[name] for name in KEPT if name in kept}
        require_types(taken, L.Trainer)
        return taken

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The optimiser of its run, if it names one of torch's: any other must be given again, as it is imported."""
        saved = self.saved.get("optimizer")
        asked: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
        module, _, name = str(asked.get("class_path")).rpartition(".")
        cls = vars(torch.optim).get(name) if module == "torch.optim" else None
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            return None
        settings = asked.get("init_args") or {}
        if not isinstance(settings, Mapping) or settings.keys() - (argument_types(cls).keys() - {"params", "lr"}):
            raise UserError(f"its optimizer does not fit {name} of this version of torch")
        return {"class_path": f"{module}.{name}", "init_args": {**settings}}

    @property
    def spec(self) -> Any:
        """What the model knows of the run's data, their `TaskData.spec`: sizes, words; None if it knows nothing."""
        return self.hparams["model"].get("spec")

    @property
    def continues(self) -> bool:
        """Whether training can go on from it; from weights alone, such as the zoo's, it begins anew."""
        return "optimizer_states" in self.saved

    @property
    def resumes(self) -> bool:
        """Whether a run of this version can be resumed from it: older ones kept their history elsewhere."""
        return self.continues and "Recorder" in self.saved.get("callbacks", {})

    def require_known_attention(self, own: str | None = None) -> None:
        """Raise UserError if its attention is neither kvt's nor named, here or by `own`."""
        attn, own = self.hparams["model"].get("attn"), own or self.named.get("attn")
        if own is not None and own != attn:
            remedy = f"pass --attn {shell_word(f'{attn!s:.100}')} or drop it"
            raise self.error(f"made with attn={attn!s:.100}, not {own}: {remedy}")
        if attn is not None and attn != own and not (isinstance(attn, str) and attn in ATTENTION):
            raise self._not_ours("attn", str(attn))

    def load_weights(self, task: Task) -> None:
        """Load the weights into a task; raise UserError if they have other names or shapes, or are not finite."""
        try:
            task.load_state_dict(self.saved["state_dict"])
        except RuntimeError as error:
            raise self.error(f"its weights do not fit {type(task).__name__} with these settings") from error
        if not all(weight.isfinite().all() for weight in task.parameters()):  # a buffer may hold −inf
            raise self.error("its weights are not finite, as the run has diverged: use another checkpoint")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its weights and their names, in hexadecimal."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.saved["state_dict"].items()):
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def taught(self) -> Mapping[str, Any]:
        """The settings of `TEACHER` of its run, and the teacher's `digest`; empty if the run has no teacher."""
        taught = self.saved.get("teacher")
        return taught if isinstance(taught, Mapping) else {}

    @property
    def trained_on(self) -> str | None:
        """The fingerprint of the run's data, `TaskData.content`; None if it has none, or the checkpoint is older."""
        return self.hparams["data"].get("content")

    def error(self, reason: str) -> UserError:
        """Return a UserError whose message begins with the path of the checkpoint."""
        return UserError(f"{self._name}: {reason}")

    @property
    def _name(self) -> str:
        return f"{self.flag} {self.path}".lstrip()

    @contextmanager
    def add_checkpoint_path(self) -> Iterator[None]:
        """Context manager: add the path of the checkpoint to a user's mistake that is raised inside."""
        try:
            yield
        except Exception as error:
            mistake = user_error(error)
            if mistake is None or str(self.path) in mistake:
                raise
            raise self.error(mistake) from None

    def build(self, cls: type[Any], settings: Mapping[str, Any]) -> Any:
        """Return a task or its data with these settings. Raises UserError if the class does not take them."""
        try:
            return cls(**settings)
        except UserError:
            raise
        except Exception as error:  # settings that no run has had raise nearly anything
            raise self.error(f"does not fit {cls.__name__} of this version ({error!s:.200})") from error

    def class_of(self, section: str) -> type[Any]:
        name, own = self.saved.get(f"{section}_class"), self.named.get(section)
        if not isinstance(name, str):
            raise self.error("does not name its task")
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

    A task of characters or numbers has `generate(prompt, tokens)`, one of translation `translate(sentences)`, every
    classification `predict(inputs)`.

    Args:
        checkpoint: a file that a run, or a plain Lightning Trainer, has saved, or a folder of `kvt export`.
        attn: the import path of your own attention that the checkpoint uses, my_attention.NearKV: it is imported only
            if you name it.
        model: the import path of your own task, my_task.MyTask: it is imported only if you name it.

    Raises:
        UserError: there is no such file, it is no checkpoint of a task, or it uses code that is not named.
    """
    named = {"attn": attn, "model": model}
    return Checkpoint(user_path(checkpoint), named, flag="").load_task(Task)  # type: ignore[type-abstract]
