"""What a test may ask for."""

import functools
import json
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from hypothesis import settings

from kvt import tune as hardware
from kvt.commands import main, run_words
from kvt.data.images import open_images
from kvt.system import run
from kvt.tasks.anomaly import BackboneFeatures
from kvt.view.pictures import Shown
from tests.conftest import CONFIGS, QUIET, SMALL, write_features, write_images, write_sentences
from tests.helpers.commands import require_refusal


def pytest_configure(config):
    """Register the settings of hypothesis before a test is collected."""
    settings.register_profile("kvt", deadline=None)  # a machine may be busy
    settings.load_profile("kvt")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def restore_matmul_precision(monkeypatch):
    """Undo what a test's commands choose for the whole process."""
    monkeypatch.setattr(hardware, "fast_products", hardware.fast_products)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def pictures() -> None:
    """Runs draw attention maps and write texts, as they do for users."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Runs show none in other tests: they take ten times as long as the training of so small a model."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(Shown, "show_maps", lambda *_: None)
        monkeypatch.setattr(Shown, "show_text", lambda *_: None)


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """The pictures of reports are empty: to draw them takes most of a report's time."""
    monkeypatch.setattr("kvt.reports.report.as_svg", lambda figure: "<svg/>")


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
def trained(tmp_path_factory, small_data) -> Callable[..., Path]:
    """Return the last checkpoint of a small run of a task with an attention, after two steps."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(config: str, attn: str = "kv") -> Path:
        place = folder / config / attn
        words = ["--config", str(CONFIGS / f"{config}.yaml"), *QUIET, *SMALL[config], "--max_steps", "2"]
        words += ["--attn", attn, *(["--data_dir", str(small_data)] if config != "human_numbers" else [])]
        run(lambda: run_words(["fit", *words, "--default_root_dir", str(place)]))
        return next(place.rglob("last.ckpt"))

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
    """Call what must end with exit code 2 and one line on stderr, and return the line.

    Nothing may be left behind but the folder of a run that has begun.
    """

    def files() -> set[Path]:
        return {path for path in Path().rglob("*") if path.parts[0] != "lightning_logs"}

    def call(command: Callable[..., object], *words: str) -> str:
        before = files()
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command(*words)
        line = require_refusal(ended.value.code, capsys.readouterr().err)
        assert files() == before
        return line

    return call
