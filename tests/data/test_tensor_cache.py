"""The data folder: what lies ready is read without a trace, and users share it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvt.tasks import Characters, Images, SentencePairs, SetAnomalies, TaskData, TextTokens
from tests.tasks.test_features import BACKBONE, random_network

HERE = {"data_dir": "data"}
FEATURES = {"backbone": BACKBONE, "set_size": 3, "val_size": 0.25, **HERE}
DATA: dict[str, Callable[[], TaskData]] = {
    "images": lambda: Images(dataset="cifar10", val_size=2, **HERE),
    "features": lambda: SetAnomalies("cifar10", weights="weights.pth", **FEATURES),
    "text": lambda: Characters(length=8, **HERE),
    "tokens": lambda: TextTokens("data/tinyshakespeare/input.txt", length=8, **HERE),
    "sentences": lambda: SentencePairs(**HERE),
}


def splits(name: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """All that a task reads."""
    data = DATA[name]()
    data.prepare_data()
    data.setup("fit")
    return data.splits


def state() -> dict[str, tuple[int, int]]:
    """Modification time and size of every file."""
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in Path().rglob("*")}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", DATA)
def test_what_lies_ready_needs_no_lock_and_is_left_as_it_is(name, tmp_path, small_data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_data, "data", ignore=shutil.ignore_patterns(".cache"))
    torch.save(random_network(BACKBONE).state_dict(), "weights.pth")
    made = splits(name)
    (Path("data") / ".cache" / "data.lock").unlink(missing_ok=True)
    before = state()
    read = splits(name)
    assert state() == before
    for split, tensors in made.items():
        for tensor, other in zip(tensors, read[split], strict=True):
            assert torch.equal(tensor, other)
            assert not other.is_inference()  # one that a model can be trained on
