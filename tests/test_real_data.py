"""The tasks on real data: `pytest -m real` with KVT_DATA_DIR naming a folder of MNIST, FashionMNIST and small CIFAR."""

import os
from pathlib import Path

import pytest

from kvt.attention import ATTENTION
from kvt.cli import CLI
from kvt.data.images import open_images
from kvt.tasks import Images
from tests.conftest import CONFIGS, QUIET, run

pytestmark = pytest.mark.real
DATA = Path(os.environ.get("KVT_DATA_DIR", "data")).resolve()


@pytest.fixture
def real(tmp_path, monkeypatch, capsys):
    """Runs an experiment on the real data and returns the metrics that it prints."""
    monkeypatch.chdir(tmp_path)

    def call(config: str, *flags: str) -> dict[str, str]:
        words = ["fit", "--config", str(CONFIGS / f"{config}.yaml"), *QUIET, "--data_dir", str(DATA), *flags]
        run(lambda: CLI(words, test=True))
        lines = capsys.readouterr().out.splitlines()
        return dict(line.split(maxsplit=1) for line in lines if line.count("  "))

    return call


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_the_published_sets_are_complete(dataset):
    data = Images(dataset=dataset, val_size=5000, mean=[0.1307], std=[0.3081], data_dir=str(DATA))
    data.prepare_data()
    data.setup("fit")
    assert {split: len(labels) for split, (_, labels) in data.splits.items()} == {
        "train": 55_000,
        "val": 5_000,
        "test": 10_000,
    }
    assert data.splits["test"][1].bincount().tolist() == (
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009] if dataset == "mnist" else [1000] * 10
    )


def test_mnists_pixels_have_the_mean_that_normalises_them():
    images, _ = open_images("mnist", DATA).load("train")
    pixels = images.float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


def test_no_image_is_trained_on_and_tested():
    data = Images(root=str(DATA / "cifar10-small"), data_dir=str(DATA))
    data.prepare_data()
    data.setup("fit")
    seen = {split: {image.numpy().tobytes() for image in images} for split, (images, _) in data.splits.items()}
    assert not seen["train"] & seen["val"]
    assert not (seen["train"] | seen["val"]) & seen["test"]


@pytest.mark.parametrize("attn", ["qkv", "kv", "kv+pos"])
def test_one_epoch_learns_most_of_mnist(real, attn):
    assert float(real("mnist", "--attn", attn, "--max_epochs", "1")["test/acc"]) > 0.8


@pytest.mark.parametrize("attn", ATTENTION)
def test_small_cifar_beats_chance_unless_the_class_token_sees_no_patch(real, attn):
    flags = ["--root", str(DATA / "cifar10-small"), "--dim", "64", "--depth", "2", "--max_epochs", "2"]
    accuracy = float(real("cifar10", "--attn", attn, *flags)["test/acc"])
    assert accuracy == 0.1 if attn == "identity" else accuracy > 0.2


def test_small_cifar100_beats_chance(real):
    flags = ["--root", str(DATA / "cifar100-small"), "--dim", "64", "--depth", "2", "--max_epochs", "3"]
    assert float(real("cifar100", *flags)["test/acc"]) > 0.02


@pytest.mark.parametrize("attn", ["qkv", "kv"])
def test_reverse_is_solved_at_the_papers_settings(real, attn):
    assert float(real("reverse", "--attn", attn)["test/acc"]) > 0.99
