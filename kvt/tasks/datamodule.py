"""`TaskData`, the base class of all data sets, and functions that find classes of tasks and data."""

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
from kvt.data.published import UNPUBLISHED, other_counts
from kvt.system import UserError, arguments, say, user_path
from kvt.tasks.base import Task, find_class, known_classes

MAX_COUNTED = 10**6  # largest number of examples that `seen_in_training` compares, which takes about three seconds


class TaskData(L.LightningDataModule, ABC):
    """A data set whose splits, usually "train", "val" and "test", are tensors.

    A subclass implements `load`. It sets `spec` if the model needs sizes or the vocabulary of the data, and `task_name`
    if the name of the task is not the class name in lower case.

    Args:
        batch_size: number of examples in a batch of one process.
        seed: seed of generated data, of random splits, of the order of batches, and of all randomness in training.
        data_dir: folder of data sets and caches; default: $KVT_DATA_DIR, else ./data.
    """

    task_name: str  # name of the task, and of the folder with its runs
    spec: dict[str, Any]  # plain values that the model needs, such as sizes and vocabulary; available before `setup`
    keeps_order: ClassVar[bool] = False  # whether validation and test read the rows in the order of `splits`
    drop_last: ClassVar[bool] = False  # whether training drops an incomplete last batch of an epoch
    path_settings: ClassVar[tuple[str, ...]] = ("data_dir",)  # arguments that say which files to read
    measured: ClassVar[tuple[str, ...]] = ()  # arguments that, if None, `__init__` may measure; `spec` has their values
    content: str | None = None  # a hash or name of the data that `load` has read from files; None if it has read none
    trained_on: str | None = None  # `content` of the data that the evaluated model was trained on; None: unknown

    def __init__(self, batch_size: int = 32, seed: int = 0, data_dir: str | None = None) -> None:
        super().__init__()
        if not hasattr(type(self), "task_name"):
            self.task_name = type(self).__name__.lower()
        if not hasattr(type(self), "spec"):  # in some subclasses, `spec` is a property
            self.spec = {}
        self.save_hyperparameters(logger=False)  # also saves the arguments of the subclass
        self.hparams.update(self.as_recorded(self.hparams))
        self.hparams.update({name: os.fspath(path) for name in self.path_settings if (path := self.hparams.get(name))})
        self.batch_size, self.seed = batch_size, seed
        self.data_dir = user_path(os.environ.get("KVT_DATA_DIR") or "data" if data_dir is None else data_dir)
        self.splits: dict[str, tuple[Tensor, ...]] = {}
        self.notes: dict[str, str] = {}  # notes for result.json, by topic
        self._train_batches: Batches | None = None
        self._resume_from: dict[str, int] | None = None

    @abstractmethod
    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Return a dict that maps each split to its tensors; set `content` if the data are read from files."""

    @classmethod
    def chance(cls, **settings: Any) -> float | None:
        """Return the accuracy of guessing for data with these constructor arguments; None if it is unknown."""
        return None

    @classmethod
    def as_recorded(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings that are arguments of the class, in the canonical form by which runs are compared."""
        return {name: value for name, value in settings.items() if name in arguments(cls)}

    def setup(self, stage: str) -> None:
        self.splits = self.splits or self.load()
        if self.content is not None:
            self.hparams["content"] = self.content  # identifies the data regardless of their path

    def note_counts(self, name: str, **counts: int) -> None:
        """Print a line and add a note if the sizes `counts` differ from the published sizes of the data set `name`."""
        if what := other_counts(name, counts):
            self.notes[UNPUBLISHED] = what
            say(f"these are not the published data: {what}")

    @property
    def are_others(self) -> bool:
        """Whether the data differ from the training data of the evaluated model; False if unknown."""
        return self.trained_on not in (None, self.content)

    def train_dataloader(self) -> Batches:
        """Return the training batches; after `load_state_dict`, the remaining batches of the epoch."""
        self._train_batches = self.batches("train", self.trainer)
        if self._resume_from is not None:
            self._train_batches.load_state_dict(self._resume_from)
            self._resume_from = None
        return self._train_batches

    def val_dataloader(self) -> Batches:
        return self.batches("val", self.trainer)

    def test_dataloader(self) -> Batches:
        return self.batches("test", self.trainer)

    def predict_dataloader(self) -> Batches:
        """Return the batches of the split to predict, with rows in the order of `splits`."""
        batches = self.batches(self.predicted, self.trainer)
        batches.mix = False
        return batches

    @property
    def validated(self) -> str:
        """The split to validate on: "train" with --overfit_batches, else "val"."""
        return "train" if getattr(self.trainer, "overfit_batches", 0) else "val"

    @property
    def predicted(self) -> str:
        """The split to predict: "test" if there is one, else "val"."""
        return "test" if "test" in self.splits else "val"

    def names(self, split: str) -> list[str] | None:
        """Return names of the examples of a split, such as file names; None if the examples have no names."""
        return None

    def state_dict(self) -> dict[str, Any]:
        # not left to the loader: to count steps, Lightning makes the loader early, and then does not restore its state
        return self._train_batches.state_dict() if self._train_batches else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is None or self.trainer.state.fn == TrainerFn.FITTING:
            self._resume_from = state_dict or None

    def input_keys(self, split: str) -> Iterable[Hashable]:
        """Return a key for each example of a split. Examples with equal inputs of the model have equal keys."""
        return row_hashes(self.splits[split][0])

    @property
    def largest_class(self) -> dict[str, float]:
        """A dict from held-out splits to the accuracy of always guessing their largest class; {} without classes."""
        return {}

    @cached_property
    def seen_in_training(self) -> dict[str, int] | None:
        """For each split but "train", how many `input_keys` are also in "train"; None beyond `MAX_COUNTED` examples."""
        if sum(len(tensors[0]) for tensors in self.splits.values()) > MAX_COUNTED:
            return None
        held_out = {split: [*self.input_keys(split)] for split in self.splits if split != "train"}
        seen = set().union(*held_out.values()).intersection(self.input_keys("train"))
        return {split: sum(key in seen for key in keys) for split, keys in held_out.items()}

    def example(self, index: int) -> Any:
        """Return one example of the validation split as a batch; raise UserError if `index` is out of range."""
        return next(self.examples(index, 1))

    def examples(self, first: int, count: int) -> Iterator[Any]:
        """Return up to `count` validation examples from `first` on, one per batch; UserError if none is at `first`."""
        rows = self.make_batches(*self.splits["val"], batch_size=1, seed=self.seed)
        if not 0 <= first < len(rows):
            raise UserError(f"example={first} must be from 0 to {len(rows) - 1}: an index of the validation split")
        return islice(rows, first, min(first + count, len(rows)))

    def sample(self, count: int, split: str = "val") -> Iterator[Any]:
        """Return up to ⌈count / 16⌉ batches of at most 16 rows of a split.

        The rows are random, or the first rows if `keeps_order` is set and the split is not "train".
        """
        settings = {"batch_size": 16, "seed": self.seed, "shuffle": split == "train", "mix": not self.keeps_order}
        return islice(self.make_batches(*self.splits[split], **settings), -(-count // 16))

    def batches(self, split: str, trainer: L.Trainer | None) -> Batches:
        """Return the batches of a split for this process of the Trainer.

        Training batches are shuffled. Unless `keeps_order`, other splits have a fixed random order, so that their first
        batches are a random sample. With --overfit_batches, training batches have a fixed order, and validation reads
        the same batches. Raises UserError if the split does not exist.
        """
        overfits = bool(getattr(trainer, "overfit_batches", 0))
        served = "train" if overfits and split == "val" else split
        if served not in self.splits:
            raise UserError(f"{self.task_name} has no {served} split: use kvt validate instead")
        settings: dict[str, Any] = {"batch_size": self.batch_size, "seed": self.seed, "mix": not self.keeps_order}
        if split == "train":
            settings |= {"shuffle": not overfits, "reseed": True, "drop_last": self.drop_last}
        if trainer is not None:
            settings |= {"rank": trainer.global_rank, "world_size": trainer.world_size}
            settings |= {"device": trainer.strategy.root_device}
        return self.make_batches(*self.splits[served], **settings)

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        """Return the loader for the tensors of a split."""
        return Batches(*tensors, **settings)


def as_recorded(name: Any, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `settings` in canonical form if `name` is a data class of kvt, else unchanged; import no user's class."""
    own = known_classes().get(name.removeprefix("kvt.tasks.")) if isinstance(name, str) else None
    return own.as_recorded(settings) if own and issubclass(own, TaskData) else settings


def section_class(section: str, path: str) -> Any:
    """Return the class at an import path: a task if `section` is "model", a data set if `section` is "data"."""
    bases: dict[str, type[Any]] = {"model": Task, "data": TaskData}
    return find_class(path, section, bases[section])


def classes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict that maps "model" and "data" to the task class and the data class of a configuration."""
    return {section: section_class(section, config[section]["class_path"]) for section in ("model", "data")}
