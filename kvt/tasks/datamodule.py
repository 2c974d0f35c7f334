"""What all tasks share of their data: splits held as tensors, the order of batches, the position of training in it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from kvt.data.loader import Batches, row_hashes
from kvt.system.console import say
from kvt.system.errors import UserError
from kvt.system.files import user_path
from kvt.system.quoting import printable
from kvt.tasks.base import known_classes

MAX_COUNTED = 10**6
"""The most examples that `seen_in_training` compares, in about three seconds."""


class TaskData(L.LightningDataModule, ABC):
    """A data set held as whole tensors, split into "train", "val" and mostly "test", served by index.

    A subclass implements `load`, sets `spec` if the model must know anything of the data, and `task_name` unless that
    is the name of the class; its `--help` has these texts, too.

    Args:
        batch_size: examples of a batch on one process.
        seed: of the split, the order of batches and all randomness of training.
        data_dir: the folder of data sets and computed features; default: $KVT_DATA_DIR, else ./data.
    """

    task_name: str  # also the name of the folder of its runs
    spec: dict[str, Any]  # the sizes, words … that the model needs, plain values, available before `setup`
    drop_last: ClassVar[bool] = False  # whether training drops an incomplete last batch of an epoch
    path_settings: ClassVar[tuple[str, ...]] = ("data_dir",)  # the arguments that are paths, different on each machine
    only_predict: str | None = None  # why nothing but predict takes the data: they have no targets and no `spec`
    content: str | None = None  # a hash of what `load` has read, before any split; None if it reads nothing
    measures_others: bool = False  # whether other data than its run's, read by its `spec`, measure a model
    trained_on: str | None = None  # the `content` of the run whose model is measured; None if it is not known

    def __init__(self, batch_size: int = 32, seed: int = 0, data_dir: str | None = None) -> None:
        super().__init__()
        if not hasattr(type(self), "task_name"):
            self.task_name = type(self).__name__.lower()
        if not hasattr(type(self), "spec"):  # some read it when it is first asked for
            self.spec = {}
        self.save_hyperparameters()  # the subclass's arguments, too
        self.hparams.update(self.as_recorded(self.hparams))
        self.hparams.update({name: os.fspath(path) for name in self.path_settings if (path := self.hparams.get(name))})
        self.batch_size, self.seed = batch_size, seed
        self.data_dir = user_path(os.environ.get("KVT_DATA_DIR") or "data" if data_dir is None else data_dir)
        self.splits: dict[str, tuple[Tensor, ...]] = {}
        self.notes: dict[str, str] = {}  # what a reader of the result should know about the data, by a word for it
        self._train_batches: Batches | None = None
        self._resume_from: dict[str, int] | None = None

    @abstractmethod
    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Make or read the tensors of each split; set `content` if they are read."""

    @classmethod
    def chance(cls, **settings: Any) -> float | None:
        """Return the accuracy of guessing, given arguments of the class; None if it is not known."""
        return None

    @classmethod
    def as_recorded(cls, settings: Mapping[str, Any], spec: Any = None) -> Mapping[str, Any]:
        """Return settings in the one form in which runs are named, stored and compared, if there are several.

        Args:
            settings: arguments of the class, of this version or an older one.
            spec: that of the data which were made with them, if it is known.
        """
        return settings

    def setup(self, stage: str) -> None:
        self.splits = self.splits or self.load()
        if self.content is not None:
            self.save_hyperparameters({"content": self.content})  # identifies the data, wherever the files are

    def note_left_out(self, place: object, what: str | None) -> None:
        """Say, and note for the result, what of a file or folder is not read; nothing if all is."""
        if what:
            self.notes["left_out"] = what
            say(printable(f"{place}: left out are {what}"))

    @property
    def are_others(self) -> bool:
        """Whether the data are known to be others than those of the run whose model they measure."""
        return self.trained_on not in (None, self.content)

    def train_dataloader(self) -> Batches:
        """Return the batches of training; after `load_state_dict`, the rest of an epoch."""
        self._train_batches = self.batches("train", self.trainer)
        if self._resume_from is not None:
            self._train_batches.load_state_dict(self._resume_from)
            now = self._train_batches.world_size
            before = self._resume_from.get("processes", now)
            if self._resume_from["batch"] and before != now:
                what = f"saved in mid-epoch with {before} devices, now {now}"
                say(f"the checkpoint was {what}: the rest of the epoch repeats some rows and leaves out others")
            self._resume_from = None
        return self._train_batches

    def val_dataloader(self) -> Batches:
        return self.batches("val", self.trainer)

    def test_dataloader(self) -> Batches:
        return self.batches("test", self.trainer)

    def predict_dataloader(self) -> Batches:
        """Return the split to predict in order."""
        return self.batches(self.predicted, self.trainer)

    @property
    def validated(self) -> str:
        """The split to validate on: with --overfit_batches that of training, whose first batches alone are learned."""
        return "train" if getattr(self.trainer, "overfit_batches", 0) else "val"

    @property
    def predicted(self) -> str:
        """The split to predict: what has no targets, else the test split, else the validation split."""
        return next(split for split in ("predict", "test", "val") if split in self.splits)

    def names(self, split: str) -> list[str] | None:
        """Return what the user calls the examples of a split, such as files; None if they have no names."""
        return None

    def state_dict(self) -> dict[str, Any]:
        # the Trainer restores this before schedules ask for the number of steps, and a loader's own state after that
        batches = self._train_batches
        return {**batches.state_dict(), "processes": batches.world_size} if batches else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._resume_from = state_dict or None

    def input_keys(self, split: str) -> Iterable[Hashable]:
        """Return a key for each example of a split, equal for examples with equal model inputs."""
        return row_hashes(self.splits[split][0])

    @cached_property
    def seen_in_training(self) -> dict[str, int] | None:
        """Count the examples of each other split whose input is also in training; None above `MAX_COUNTED` examples."""
        if sum(len(tensors[0]) for tensors in self.splits.values()) > MAX_COUNTED:
            return None
        held_out = {split: [*self.input_keys(split)] for split in self.splits if split != "train"}
        seen = set().union(*held_out.values()).intersection(self.input_keys("train"))
        return {split: sum(key in seen for key in keys) for split, keys in held_out.items()}

    def example(self, index: int) -> Any:
        """Return one row of the validation split as a batch; raise UserError if there is no such row."""
        return next(self.examples(index, 1))

    def examples(self, first: int, count: int) -> Iterator[Any]:
        """Return up to `count` validation rows from `first` on, in batches of one; raise UserError if there is none."""
        rows = self.make_batches(*self.splits["val"], batch_size=1, seed=self.seed)
        if not 0 <= first < len(rows):
            raise UserError(f"example={first} must be from 0 to {len(rows) - 1}, an index of the validation split")
        return islice(rows, first, min(first + count, len(rows)))

    def sample(self, count: int, split: str = "val") -> Iterator[Any]:
        """Return at least `count` examples of a split in batches of 16: of training at random, else the first."""
        settings = {"batch_size": 16, "seed": self.seed, "shuffle": split == "train"}
        return islice(self.make_batches(*self.splits[split], **settings), -(-count // 16))

    def batches(self, split: str, trainer: L.Trainer | None) -> Batches:
        """Return the batches of a split for a process of this Trainer; those of training are shuffled.

        With --overfit_batches they are unshuffled, and are validated on, too: the first of them alone are learned.
        """
        overfits = bool(getattr(trainer, "overfit_batches", 0))
        served = "train" if overfits and split == "val" else split
        if served not in self.splits:
            raise UserError(self.only_predict or f"{self.task_name} has no {served} split: use kvt validate")
        settings: dict[str, Any] = {"batch_size": self.batch_size, "seed": self.seed}
        if split == "train":
            settings |= {"shuffle": not overfits, "reseed": True, "drop_last": self.drop_last}
        if trainer is not None:
            settings |= {"rank": trainer.global_rank, "world_size": trainer.world_size}
            settings |= {"device": trainer.strategy.root_device}
        return self.make_batches(*self.splits[served], **settings)

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        """Return the loader of a split's tensors."""
        return Batches(*tensors, **settings)


def as_recorded(name: Any, settings: Mapping[str, Any], spec: Any = None) -> Mapping[str, Any]:
    """Return settings of kvt's own data class of that name, or import path, in its recorded form; others as they are.

    Nothing is imported: the name may come from any file.
    """
    own = known_classes().get(name.removeprefix("kvt.tasks.")) if isinstance(name, str) else None
    return own.as_recorded(settings, spec) if own and issubclass(own, TaskData) else settings
