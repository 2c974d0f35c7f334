"""A run is a function of its seed and its training data, bit by bit; the test split is read once."""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from kvt.data.loader import Batches
from kvt.tasks import Recall, TaskData
from tests.conftest import CONFIGS, SMALL
from tests.helpers.runs import equal, read_history, read_result, weights
from tests.run.test_same_data import features, images, sentences, text

pytestmark = pytest.mark.slow

TASKS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
WITHOUT_TEST = ("characters", "human_numbers", "language_model")
FITTING, TESTING = TrainerFn.FITTING, TrainerFn.TESTING


class Watched:
    """The batches that a run reads, in order."""

    def __init__(self) -> None:
        self.batches: list[tuple[TrainerFn, str, bytes]] = []

    def read(self, fn: TrainerFn) -> list[tuple[str, bytes]]:
        return [(split, content) for when, split, content in self.batches if when == fn]


@pytest.fixture
def watch(monkeypatch):
    """Return what begins to watch; the newest `Watched` notes everything."""
    watched = []
    serve = Batches.__iter__

    def begin() -> Watched:
        watched.append(Watched())
        return watched[-1]

    def served(loader):
        for batch in serve(loader):
            if hasattr(loader, "of"):
                trainer, split = loader.of
                content = b"".join(part.contiguous().numpy().tobytes() for part in batch)
                watched[-1].batches.append((trainer.state.fn, split, content))
            yield batch

    def of_split(split, make):
        def made(data):
            loaders = make(data)
            for loader in loaders if isinstance(loaders, list) else [loaders]:
                loader.of = (data.trainer, split)
            return loaders

        return made

    for name in ("train", "val", "test"):
        loader = f"{name}_dataloader"
        for cls in (TaskData, Recall):
            monkeypatch.setattr(cls, loader, of_split(name, getattr(cls, loader)))
    monkeypatch.setattr(Batches, "__iter__", served)
    return begin


# ---- the test split is read once, at the end -----------------------------------------------------


@pytest.mark.parametrize("config", TASKS)
def test_training_reads_no_test_split_and_the_test_reads_it_once(experiment, watch, config):
    watched = watch()
    experiment(config, *SMALL[config])
    fitted, tested = watched.read(FITTING), watched.read(TESTING)
    assert {split for split, _ in fitted} == {"train", "val"}
    assert len(fitted) + len(tested) == len(watched.batches)
    assert [fn for fn, *_ in watched.batches] == [FITTING] * len(fitted) + [TESTING] * len(tested)
    if config in WITHOUT_TEST:
        assert not tested
    else:
        assert {split for split, _ in tested} == {"test"}
        assert len({content for _, content in tested}) == len(tested)
        seen = {content for _, content in fitted}
        assert not seen & {content for _, content in tested}


# ---- the seed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["sort", "cifar10", "anomaly", "characters", "human_numbers", "translation"])
def test_a_seed_makes_one_run_and_another_makes_another(experiment, watch, config):
    runs = []
    for seed in ("3", "3", "4"):
        watched = watch()
        torch.rand(int(seed))  # whatever ran before
        result = experiment(config, *SMALL[config], "--seed", seed)
        runs.append((watched, result, result["path"].parent))
    (one, result, run), (again, _, run_again), (other, other_result, other_run) = runs
    assert one.batches == again.batches
    for name in ("best", "last"):
        assert equal(weights(run, name), weights(run_again, name))
    assert read_result(run) == read_result(run_again)
    assert read_history(run) == read_history(run_again)

    assert not equal(weights(run, "last"), weights(other_run, "last"))
    assert one.read(FITTING)[0] != other.read(FITTING)[0]
    assert result["val/loss"] != other_result["val/loss"]
    assert read_history(run) != read_history(other_run)


# ---- what is held out has no part in what is learned ---------------------------------------------


def other_images(root: Path) -> None:
    for label in range(3):
        shutil.copy(root / "train" / f"class{label}" / "0.png", root / "test" / f"class{label}" / "4.png")


def other_features(root: Path) -> None:
    splits = torch.load(root / "mine.pt")
    splits["test"] = (splits["test"][0].flip(0) * 3, splits["test"][1])
    torch.save(splits, root / "mine.pt")


def other_text(root: Path) -> None:
    path = root / "text.txt"
    kept = path.read_text()[:-51]  # of 516 characters, a tenth are validated on
    path.write_text(f"{kept}{'o' * 51}")


def other_sentences(root: Path) -> None:
    for split in ("val", "test"):
        for language in ("de", "en"):
            (root / f"{split}.{language}").write_text("Nothing here is known!\n" * 9)


@pytest.mark.parametrize(
    ("write", "change"),
    [(images, other_images), (features, other_features), (text, other_text), (sentences, other_sentences)],
)
def test_other_held_out_data_teach_the_equal(experiment, in_tmp_dir, write, change):
    """Bit by bit, at every step; if the validation split is the same, so is the best checkpoint."""
    results = []
    for name in ("one", "other"):
        (in_tmp_dir / name).mkdir()
        words, _ = write(in_tmp_dir / name / "mine")
        if name == "other":
            change(in_tmp_dir / name / "mine")
        results.append(experiment(*words))
    one, other = results
    assert equal(weights(one["path"].parent, "last"), weights(other["path"].parent, "last"))
    trained = [
        [{name: value for name, value in row.items() if name.startswith("train/")} for row in read_history(path.parent)]
        for path in (one["path"], other["path"])
    ]
    assert trained[0] == trained[1]
    if write in (images, features):
        assert equal(weights(one["path"].parent, "best"), weights(other["path"].parent, "best"))
        assert one["test/loss"] != other["test/loss"]
    else:
        assert one["val/loss"] != other["val/loss"]
