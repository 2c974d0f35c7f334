import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image

from kvt.cli.lightning_cli import run_words
from kvt.cli.main import main
from kvt.data.images import open_images
from kvt.run.pictures import AttentionMaps
from kvt.system import hardware
from kvt.system.console import run
from kvt.tasks.anomaly import BackboneFeatures
from tests.helpers.hostile import held, require_refusal  # noqa: F401 (a fixture)

# for small tensors, waking a second thread costs more than it does; here, and in the processes that tests start
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` ignores Ctrl-C, and so would what tests start
settings.register_profile("kvt", deadline=None)  # a machine may be busy
settings.load_profile("kvt")
INPUTS = 400  # hostile ones, of all tests together


def pytest_addoption(parser):
    parser.addoption("--inputs", type=int, default=INPUTS, help="how many hostile inputs to try, with -m fuzz")


def pytest_configure(config):
    """Register the settings of fuzz tests before a test is collected."""
    many = config.getoption("inputs")
    unchecked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    # up to the default number, the inputs are the same every time
    fuzz = settings(max_examples=many, derandomize=many <= INPUTS, suppress_health_check=unchecked)
    settings.register_profile("fuzz", fuzz)


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests, before any is deselected."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = [*items]
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


REPOSITORY = Path(__file__).parent.parent
CONFIGS = REPOSITORY / "kvt" / "configs"
QUIET = ["--enable_progress_bar", "false", "--accelerator", "cpu"]
SMALL_LISTS = ["--train_size", "96", "--val_size", "20", "--test_size", "20", "--batch_size", "16", "--dim", "16"]
TINY = ["--dim", "16", "--depth", "1", "--heads", "2"]
SMALL_RECALL = [*SMALL_LISTS, "--depth", "1", "--heads", "2", "--max_epochs", "2"]
SMALL_IMAGES = ["--dim=16", "--depth=2", "--heads=2", "--max_epochs=2", "--batch_size=8", "--val_size=6"]
SMALL = {
    **dict.fromkeys(("reverse", "sort", "swap", "sub", "copy", "shift", "permute"), SMALL_LISTS),
    **dict.fromkeys(("mnist", "fashion_mnist", "cifar10", "cifar100"), SMALL_IMAGES),
    "anomaly": [*TINY, "--batch_size", "32", "--max_epochs", "1"],
    "characters": [*TINY, "--length", "12", "--batch_size", "8", "--max_steps", "6", "--val_check_interval", "3"],
    "human_numbers": [*TINY, "--length", "512", "--max_epochs", "1"],
    "language_model": [
        *(*TINY, "--pattern", "quo*.py", "--length", "24", "--val_size", "0.3", "--batch_size", "8"),
        *("--max_steps", "6", "--val_check_interval", "3"),
    ],
    "translation": [*TINY, "--batch_size", "4", "--max_len", "12", "--max_epochs", "2"],
    "mqar": [*SMALL_RECALL, "--vocab", "16", "--length", "12", "--pairs", "2"],
    **{name: [*SMALL_RECALL, "--length", "12", "--pairs", "2"] for name in ("associative_recall", "selective_copy")},
    "fuzzy_recall": [*SMALL_RECALL, "--length", "16", "--motif", "2"],
    **{
        name: [*SMALL_RECALL, "--length", "12"] for name in ("induction", "noisy_recall", "compression", "memorization")
    },
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


@pytest.fixture(autouse=True)
def restore_matmul_precision(monkeypatch):
    """Undo what a test's commands choose for the whole process."""
    monkeypatch.setattr(hardware, "fast_products", hardware.fast_products)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def pictures() -> None:
    """Runs draw attention maps, as they do for users."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Runs draw none in other tests: they take ten times as long as the training of so small a model."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(AttentionMaps, "show", lambda *_: None)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    """Return a data folder with a few random images of each image set, features of CIFAR-100, and short texts."""
    root = tmp_path_factory.mktemp("data")
    for name in ("mnist", "fashion_mnist"):
        write_images(root / name, classes=3, size=28, mode="L")
    for name in ("cifar10", "cifar100"):
        write_images(root / name, classes=3, size=32, mode="RGB")
    cifar100 = BackboneFeatures(open_images("cifar100", root), "resnet34", None, root)
    write_features(cifar100.cache, classes=3, width=cifar100.feature_dim)
    (root / "tinyshakespeare").mkdir()
    (root / "tinyshakespeare" / "input.txt").write_text("To be, or not to be: that is the question.\n" * 12)
    write_sentences(root / "multi30k", {"train": 22, "val": 6, "test_2016_flickr": 5})
    return root


@pytest.fixture
def in_tmp_dir(tmp_path, small_data, monkeypatch) -> Path:
    """An empty working directory, the small data as the data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVT_DATA_DIR", str(small_data))
    return tmp_path


@pytest.fixture
def offline(monkeypatch) -> None:
    """No network."""

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, small_data) -> Callable[[str], Path]:
    """Return the last checkpoint of a small run of a task, after two steps."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(config: str) -> Path:
        words = ["--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], "--max_steps", "2"]
        words += ["--data_dir", str(small_data)] if config != "human_numbers" else []
        run(lambda: run_words(["fit", *words, "--default_root_dir", str(folder / config)]))
        return next((folder / config).rglob("last.ckpt"))

    return train


@pytest.fixture
def experiment(in_tmp_dir) -> Callable[..., dict]:
    """Run an experiment in this process and return its result.json (empty under fast_dev_run)."""

    def call(config: str, *flags: str) -> dict:
        before = set(in_tmp_dir.rglob("result.json"))
        run(lambda: run_words(["run", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *flags]))
        new = set(in_tmp_dir.rglob("result.json")) - before
        return {"path": (path := new.pop()), **json.loads(path.read_text())} if new else {}

    return call


@pytest.fixture
def kvt(in_tmp_dir) -> Callable[..., None]:
    """Run a `kvt` command in this process."""
    return lambda *words: run(lambda: run_words([*words, *QUIET]))


@pytest.fixture
def says(monkeypatch, capsys, in_tmp_dir) -> Callable[..., list[str]]:
    """Run the `kvt` command in this process; return the lines that it prints."""

    def call(*words: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["kvt", *map(str, words)])
        capsys.readouterr()
        main()
        return capsys.readouterr().out.splitlines()

    return call


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Any]:
    """Chromium without a window, as Selenium drives it."""
    webdriver = import_module("selenium.webdriver")  # of the extra `browser`
    chromium, driver = which("chromium"), which("chromedriver")
    if not (chromium and driver):
        pytest.fail("there is no chromium with chromedriver: install both, or leave out -m browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless=new no-sandbox disable-gpu no-first-run disable-background-networking disable-component-update"
    for flag in [*flags.split(), "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture
def mistake(capsys, in_tmp_dir) -> Callable[..., str]:
    """Call what must end with exit code 2 and one line on stderr, and return the line; nothing may be left behind."""

    def call(command: Callable[..., object], *words: str) -> str:
        before = sorted(os.walk("."))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(*words)
        line = require_refusal(ended.value.code, capsys.readouterr().err)
        assert sorted(os.walk(".")) == before
        return line

    return call
