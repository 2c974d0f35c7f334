"""Settings of small runs, and data for them. Fixtures stand in `tests/fixtures.py`, which imports torch."""

import email
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

# for small tensors, waking a second thread costs more than it does; here, and in the processes that tests start
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` ignores Ctrl-C, and so would what tests start

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests, before any is deselected."""
SKIPPED = pytest.StashKey[list[str]]()
"""Test files that need a library which is not installed."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = [*items]


def pytest_collection(session):
    """Import fixtures where tests are collected: the process that starts the others need not wait for torch."""
    session.config.pluginmanager.import_plugin("tests.fixtures")
    session.config.stash[SKIPPED] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:
        collector.config.stash[SKIPPED].append(report.nodeid)
    return report


REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "kvt" / "configs"
QUIET = ["--enable_progress_bar", "false", "--accelerator", "cpu"]
SMALL_LISTS = ["--train_size", "96", "--val_size", "20", "--test_size", "20", "--batch_size", "16", "--dim", "16"]
TINY = ["--dim", "16", "--depth", "1", "--heads", "2"]
SMALL_RECALL = [*SMALL_LISTS, "--depth", "1", "--heads", "2", "--max_epochs", "2"]
SMALL_IMAGES = ["--dim=16", "--depth=2", "--heads=2", "--max_epochs=2", "--batch_size=8", "--val_size=6"]


def tasks_of(name: str) -> list[str]:
    """Return the names of the configurations of a class of tasks."""
    return [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if f"kvt.tasks.{name}\n" in path.read_text()]


SMALL = {
    **dict.fromkeys(tasks_of("ListTask"), SMALL_LISTS),
    **dict.fromkeys(tasks_of("ImageTask"), SMALL_IMAGES),
    "anomaly": [*TINY, "--batch_size", "32", "--max_epochs", "1"],
    "characters": [*TINY, "--length", "12", "--batch_size", "8", "--max_steps", "6", "--val_check_interval", "3"],
    "human_numbers": [*TINY, "--length", "512", "--max_epochs", "1"],
    "language_model": [
        *(*TINY, "--text", str(Path(email.__file__).parent), "--pattern", "*mime.py"),  # two files, without a long walk
        *("--length", "24", "--val_size", "0.3", "--batch_size", "8"),
        *("--max_steps", "6", "--val_check_interval", "3"),
    ],
    "translation": [*TINY, "--batch_size", "4", "--max_len", "12", "--max_epochs", "2"],
    "mqar": [*SMALL_RECALL, "--vocab", "16", "--length", "12", "--pairs", "2"],
    **{name: [*SMALL_RECALL, "--length", "12", "--pairs", "2"] for name in ("associative_recall", "selective_copy")},
    "induction": [*SMALL_RECALL, "--length", "12"],
}
"""Flags by configuration that make its experiment a matter of seconds."""


def slow(*cases):
    """Return parameters with which a test is slow."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


GERMAN = {"der": "the", "ein": "a", "Hund": "dog", "Mann": "man", "Ball": "ball", "läuft": "runs", "sieht": "sees"}


def write_images(root: Path, classes: int, size: int, mode: str, train: int = 12, test: int = 4) -> None:
    """Write a folder of images of random pixels, `train` and `test` of each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for label in range(classes):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (size, size, 3) if mode == "RGB" else (size, size), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")


def write_features(path: Path, classes: int, width: int, train: int = 100, test: int = 10, seed: int = 0) -> None:
    """Write a file of random features, `train` and `test` of each class."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = {split: torch.arange(classes).repeat(count) for split, count in (("train", train), ("test", test))}
    torch.save({split: (torch.randn(len(y), width, generator=generator), y) for split, y in labels.items()}, path)


def write_sentences(root: Path, splits: dict[str, int]) -> None:
    """Write a German-English corpus of random words, with this many pairs in each split."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for split, count in splits.items():
        german = [[str(word) for word in rng.choice([*GERMAN], rng.integers(2, 7))] for _ in range(count)]
        (root / f"{split}.de").write_text("".join(f"{' '.join(words)}.\n" for words in german))
        (root / f"{split}.en").write_text("".join(f"{' '.join(GERMAN[w] for w in words)}.\n" for words in german))
