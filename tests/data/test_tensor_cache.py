"""The data folder: what lies ready is read without a trace, and users share it."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvt.tasks.anomaly import SetAnomalies
from kvt.tasks.datamodule import TaskData
from kvt.tasks.images import Images
from kvt.tasks.language import Characters
from kvt.tasks.translation import SentencePairs
from tests.conftest import write_images, write_sentences
from tests.data.test_images import idx, mnist_files
from tests.tasks.test_features import BACKBONE, random_network

FOLDER = Path("data")


HERE = {"data_dir": "data"}
FEATURES = {"backbone": BACKBONE, "set_size": 3, "val_size": 0.25, **HERE}
DATA: dict[str, Callable[[], TaskData]] = {
    "images": lambda: Images(dataset="cifar10", val_size=2, **HERE),
    "mnist": lambda: Images(dataset="mnist", mean=[0.1], std=[0.3], val_size=2, **HERE),
    "features": lambda: SetAnomalies("cifar10", weights="weights.pth", **FEATURES),
    "text": lambda: Characters(length=8, **HERE),
    "sentences": lambda: SentencePairs(**HERE),
}


@pytest.fixture
def lies_ready(tmp_path, monkeypatch) -> None:
    """A working directory with a data folder that holds every data set, nothing decoded, and no network."""

    def asked(*_, **__):
        pytest.fail("the network was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    write_images(FOLDER / "cifar10", classes=3, size=32, mode="RGB")
    raw = FOLDER / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, array in mnist_files().items():
        (raw / name).write_bytes(idx(array))
    write_sentences(FOLDER / "multi30k", {"train": 22, "val": 6, "test_2016_flickr": 5})
    (FOLDER / "tinyshakespeare").mkdir()
    (FOLDER / "tinyshakespeare" / "input.txt").write_text("To be, or not to be: that is the question.\n" * 12)
    torch.save(random_network(BACKBONE).state_dict(), "weights.pth")


def splits(name: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """All that a task reads."""
    data = DATA[name]()
    data.prepare_data()
    data.setup("fit")
    return data.splits


def state() -> dict[str, tuple[int, int]]:
    """Modification time and size of every file."""
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in Path().rglob("*")}


@pytest.mark.usefixtures("lies_ready")
@pytest.mark.parametrize("name", DATA)
def test_what_lies_ready_needs_no_lock_and_is_left_as_it_is(name):
    made = splits(name)
    (FOLDER / ".cache" / "data.lock").unlink(missing_ok=True)
    before = state()
    read = splits(name)
    assert state() == before
    for split, tensors in made.items():
        for tensor, other in zip(tensors, read[split], strict=True):
            assert torch.equal(tensor, other)
            assert not other.is_inference()  # one that a model can be trained on
