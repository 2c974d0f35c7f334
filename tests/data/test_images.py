"""torchvision's data sets, read where torchvision keeps them or downloaded."""

import hashlib
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from torchvision import datasets

from kvt.data import images as module
from kvt.data.images import DecodedSource, KnownSource, open_images
from tests.conftest import REPOSITORY
from tests.data.helpers import files_in, user_error
from tests.data.test_image_folder import write_folder


def idx(array: np.ndarray) -> bytes:
    """The IDX format of MNIST: 0, 0, type 8 (bytes), the number of axes, their big-endian sizes, the data."""
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def mnist_files() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"{split}-{kind}-ubyte": rng.integers(0, high, shape, dtype=np.uint8)
        for split, n in (("train", 5), ("t10k", 3))
        for kind, high, shape in (("images-idx3", 256, (n, 28, 28)), ("labels-idx1", 10, (n,)))
    }


@pytest.fixture
def raw(tmp_path) -> Path:
    folder = tmp_path / "data/MNIST/raw"
    folder.mkdir(parents=True)
    for name, array in mnist_files().items():
        (folder / name).write_bytes(idx(array))
    return folder


@pytest.mark.usefixtures("offline")
def test_mnist_files_are_read_where_torchvision_keeps_them(tmp_path, raw):
    mnist = open_images("mnist", tmp_path / "data")
    assert (mnist.name, mnist.classes, mnist.shape) == ("mnist", list("0123456789"), (1, 28, 28))
    mnist.prepare()
    for split, file in (("train", "train"), ("test", "t10k")):
        images, labels = mnist.load(split)
        assert images.dtype == torch.uint8
        assert np.array_equal(images.numpy(), mnist_files()[f"{file}-images-idx3-ubyte"][:, None])
        assert labels.dtype == torch.int64
        assert np.array_equal(labels.numpy(), mnist_files()[f"{file}-labels-idx1-ubyte"])


def cifar_archives(tmp_path: Path, monkeypatch) -> Path:
    """A small CIFAR-10 in its authors' format; torchvision's checksums are set to it."""
    folder = tmp_path / "data/cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def put(name: str, entry: dict) -> list[str]:
        content = pickle.dumps(entry)
        (folder / name).write_bytes(content)
        return [name, hashlib.md5(content).hexdigest()]

    def batch() -> dict:
        return {"data": rng.integers(0, 256, (2, 3072), dtype=np.uint8), "labels": [3, 9]}

    monkeypatch.setattr(datasets.CIFAR10, "train_list", [put(f"data_batch_{i}", batch()) for i in (1, 2)])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [put("test_batch", batch())])
    name, md5 = put("batches.meta", {"label_names": module.SETS["cifar10"].classes})
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return folder


@pytest.mark.usefixtures("offline")
def test_cifar_batches_become_channels_first(tmp_path, monkeypatch):
    folder = cifar_archives(tmp_path, monkeypatch)
    cifar = open_images("cifar10", tmp_path / "data")
    cifar.prepare()
    images, labels = cifar.load("test")
    rows = pickle.loads((folder / "test_batch").read_bytes())["data"]
    assert images.is_contiguous()
    assert np.array_equal(images.numpy(), rows.reshape(2, 3, 32, 32))  # CIFAR's rows are plane by plane
    assert labels.tolist() == [3, 9]
    assert labels.dtype == torch.int64
    assert cifar.load("train")[0].shape == (4, 3, 32, 32)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("content", [None, b"", b"\0\0\x08\x03" + bytes(20)])
def test_a_missing_or_broken_file_without_archive_or_network(tmp_path, capfd, raw, content):
    (raw / "t10k-labels-idx1-ubyte").unlink()
    if content is not None:
        (raw / "t10k-labels-idx1-ubyte").write_bytes(content)
    message = user_error(open_images("mnist", tmp_path / "data").prepare)
    assert [word for word in (str(raw), "t10k-labels-idx1-ubyte.gz", "--data_dir") if word not in message] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("labels", [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 10, 9, 8]], ids=str)
def test_labels_that_do_not_fit_are_told_when_they_are_read(tmp_path, raw, labels):
    """As those of EMNIST under MNIST's names, which begin with 1."""
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.array(labels, dtype=np.uint8)))
    assert f"mnist in {raw}: train" in user_error(open_images("mnist", tmp_path / "data").prepare)


def test_open_images_chooses(tmp_path):
    write_folder(tmp_path / "pets")
    write_folder(tmp_path / "data/cifar10")
    assert open_images("mnist", tmp_path / "data", tmp_path / "pets").name == "pets"
    assert isinstance(open_images("cifar10", tmp_path / "data"), DecodedSource)
    (tmp_path / "data/cifar10").rename(tmp_path / "elsewhere")
    (tmp_path / "data/cifar10").symlink_to(tmp_path / "elsewhere")
    assert open_images("cifar10", tmp_path / "data").name == "cifar10", "a linked folder"
    assert isinstance(open_images("cifar100", tmp_path / "data"), KnownSource)
    assert "'cifar10'" in user_error(lambda: open_images("cifar_10", tmp_path / "data"))


@pytest.mark.usefixtures("offline")
def test_a_set_of_ones_own_is_one_entry(tmp_path):
    """As the guide has it; without an address, the files must be those of the entry."""
    page = (REPOSITORY / "docs/guides/images.md").read_text()
    exec(
        re.search(r"```python\n(import torch\nfrom scipy.*?)```", page, re.DOTALL)[1], names := {"__name__": "my_svhn"}
    )
    (tmp_path / "svhn").mkdir()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)  # (H, W, C, N)
    for split in ("train", "test"):
        scipy.io.savemat(tmp_path / f"svhn/{split}_32x32.mat", {"X": pixels, "y": np.arange(1, 21)[:, None] % 10 + 1})
    data = names["HouseNumbers"](dataset="svhn", data_dir=str(tmp_path), val_size=0.5)
    data.prepare_data()
    data.setup("fit")
    images, labels = data.splits["test"]
    assert np.array_equal(images.numpy(), pixels.transpose(3, 2, 0, 1))
    assert labels.tolist() == [*range(2, 10), 0, 1] * 2
    assert (data.spec["classes"], data.spec["mean"]) == ([*"0123456789"], [0.4377, 0.4438, 0.4728])
    assert (names["HouseNumbers"].chance("svhn"), data.task_name) == (0.1, "svhn")
    unpublished = KnownSource("svhn", replace(data.sets["svhn"], url=""), tmp_path)
    assert "svhn" in user_error(unpublished.prepare)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("archived", [True, False])
def test_a_cifar_that_was_not_published_is_not_opened(in_tmp_dir, archived):
    """Its batches are pickles, which could run code."""

    class Program:
        def __reduce__(self):
            return os.mkdir, ("ran",)

    if archived:
        Path("cifar-10-python.tar.gz").write_bytes(b"another archive")
    else:
        Path("cifar-10-batches-py").mkdir()
        for file in ("data_batch_1", "test_batch", "batches.meta"):
            Path("cifar-10-batches-py", file).write_bytes(pickle.dumps({"data": Program()}))
    before = files_in(in_tmp_dir)
    assert "cifar10" in user_error(open_images("cifar10", in_tmp_dir).prepare)
    assert files_in(in_tmp_dir) == before
    assert not Path("ran").exists()
