"""A run is a function of its seed, bit by bit; what is held out has no part in it, and the test split is read once."""

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from kvt.data.loader import Batches
from kvt.tasks import Task, TaskData
from kvt.training.load_checkpoint import read_checkpoint
from tests.conftest import CONFIGS, SMALL, SMALL_IMAGES, SMALL_LISTS, write_features, write_images, write_sentences

pytestmark = pytest.mark.slow

TASKS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
WITHOUT_TEST = ("characters", "human_numbers")
CLOCKS = {"started", "finished", "seconds", "tokens_per_second", "images_per_second", "sets_per_second", "path"}


class Watched:
    """What happened in a run: every batch that was read, in order, and with which weights training and test began."""

    def __init__(self) -> None:
        self.batches: list[tuple[TrainerFn, str, bytes]] = []
        self.trained: dict[str, torch.Tensor] = {}
        self.tested: dict[str, torch.Tensor] = {}

    def read(self, fn: TrainerFn) -> list[tuple[str, bytes]]:
        return [(split, content) for when, split, content in self.batches if when == fn]


@pytest.fixture
def watch(monkeypatch):
    """Begins to watch anew."""
    watched = Watched()
    make, serve = TaskData._batches, Batches.__iter__
    train, test = Task.on_train_start, Task.on_test_start

    def made(data, split, **order):
        loader = make(data, split, **order)
        loader.of = (data, split)
        return loader

    def served(loader):
        for batch in serve(loader):
            if hasattr(loader, "of"):
                data, split = loader.of
                content = b"".join(part.contiguous().numpy().tobytes() for part in batch)
                watched.batches.append((data.trainer.state.fn, split, content))
            yield batch

    def began(name, hook):
        def call(task):
            setattr(watched, name, {key: tensor.clone() for key, tensor in task.state_dict().items()})
            hook(task)

        return call

    monkeypatch.setattr(TaskData, "_batches", made)
    monkeypatch.setattr(Batches, "__iter__", served)
    monkeypatch.setattr(Task, "on_train_start", began("trained", train))
    monkeypatch.setattr(Task, "on_test_start", began("tested", test))

    def begin() -> Watched:
        nonlocal watched
        watched = Watched()
        return watched

    return begin


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")["state_dict"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def timeless(result: dict) -> dict:
    return {name: value for name, value in result.items() if name not in CLOCKS}


def history(run: Path) -> list[dict[str, str]]:
    with (run / "history.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


# ---- the test split is read once, at the end -----------------------------------------------------


@pytest.mark.parametrize("config", TASKS)
def test_training_reads_no_test_and_the_test_reads_it_once_with_the_best_weights(experiment, watch, config):
    watched = watch()
    run = experiment(config, *SMALL[config])["path"].parent
    fitted, tested = watched.read(TrainerFn.FITTING), watched.read(TrainerFn.TESTING)
    assert {split for split, _ in fitted} == {"train", "val"}
    assert len(fitted) + len(tested) == len(watched.batches)
    assert [fn for fn, *_ in watched.batches] == [TrainerFn.FITTING] * len(fitted) + [TrainerFn.TESTING] * len(tested)
    if config in WITHOUT_TEST:
        assert not tested
    else:
        assert {split for split, _ in tested} == {"test"}
        assert len({content for _, content in tested}) == len(tested)
        assert same(watched.tested, weights(run, "best"))
        seen = {content for _, content in fitted}
        assert not seen & {content for _, content in tested}


def test_what_is_tested_is_not_what_is_trained_last(experiment, watch):
    """Or the test above would show little."""
    watched = watch()
    run = experiment("copy", *SMALL_LISTS, "--max_epochs", "6", "--lr", "0.3")["path"].parent
    assert not same(watched.tested, weights(run, "last"))
    assert same(watched.tested, weights(run, "best"))


# ---- the seed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["sort", "cifar10", "anomaly", "characters", "human_numbers", "translation"])
def test_a_seed_makes_one_run_and_another_makes_another(experiment, watch, config):
    runs = []
    for seed in ("3", "3", "4"):
        watched = watch()
        torch.rand(int(seed))  # whatever ran before
        result = experiment(config, *SMALL[config], "--seed", seed)
        runs.append((watched, result, result["path"].parent))
    (one, result, run), (again, result_again, run_again), (other, other_result, other_run) = runs
    assert one.batches == again.batches
    assert same(one.trained, again.trained)
    for name in ("best", "last"):
        assert same(weights(run, name), weights(run_again, name))
    assert timeless(result) == timeless(result_again)
    assert history(run) == history(run_again)

    drawn = {name for name, tensor in one.trained.items() if tensor.unique().numel() > 1}
    assert len(drawn) > 5
    assert not any(torch.equal(one.trained[name], other.trained[name]) for name in drawn)
    assert one.read(TrainerFn.FITTING)[0] != other.read(TrainerFn.FITTING)[0]
    assert result["val/loss"] != other_result["val/loss"]
    assert history(run) != history(other_run)


# ---- what is held out has no part in what is learned ---------------------------------------------


def images(root: Path, other: bool) -> list[str]:
    write_images(root, classes=3, size=28, mode="L", train=8, test=5 if other else 4)
    return ["mnist", *SMALL_IMAGES, "--root", str(root)]


def features(root: Path, other: bool) -> list[str]:
    write_features(root / "mine.pt", classes=4, width=8, train=30, test=11)
    splits = torch.load(root / "mine.pt")
    if other:
        splits["test"] = (splits["test"][0].flip(0) * 3, splits["test"][1])
    torch.save(splits, root / "mine.pt")
    return ["anomaly", *SMALL["anomaly"], "--set_size", "4", "--features", str(root / "mine.pt")]


def lists(root: Path, other: bool) -> list[str]:
    return ["sort", *SMALL_LISTS, *(["--test_size", "31", "--val_size", "17"] if other else [])]


def text(root: Path, other: bool) -> list[str]:
    begun, rest = "what is trained on, and " * 30, "is no tea " * 8  # 720 and 80
    root.mkdir(parents=True)
    (root / "text.txt").write_text(begun + ("o" * len(rest) if other else rest))
    return ["characters", *SMALL["characters"], "--text", str(root / "text.txt"), "--val_size", "0.1"]


def sentences(root: Path, other: bool) -> list[str]:
    write_sentences(root, {"train": 22, "val": 6, "test": 5})
    if other:
        for split in ("val", "test"):
            for language in ("de", "en"):
                (root / f"{split}.{language}").write_text("Nothing here is known!\n" * 9)
    return ["translation", *SMALL["translation"], "--root", str(root)]


@pytest.mark.parametrize("write", [images, features, lists, text, sentences])
def test_other_held_out_data_teach_the_same(experiment, in_tmp_dir, write):
    """Bit by bit, at every step; where validation is the same, the same checkpoint is chosen."""
    one, other = (experiment(*write(in_tmp_dir / name / "mine", name == "other")) for name in ("one", "other"))
    assert same(weights(one["path"].parent, "last"), weights(other["path"].parent, "last"))
    trained = [
        [
            {name: value for name, value in row.items() if name.startswith("train/")}
            for row in history(result["path"].parent)
        ]
        for result in (one, other)
    ]
    assert trained[0] == trained[1]
    if write in (images, features):
        assert same(weights(one["path"].parent, "best"), weights(other["path"].parent, "best"))
        assert one["test/loss"] != other["test/loss"]
    else:
        assert one["val/loss"] != other["val/loss"]
