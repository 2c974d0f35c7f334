"""Images of folders and of torchvision's data sets: the pixels, in the order of torchvision; or one line."""

import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from kvt.data.images import DecodedImages, KnownImages, open_images
from tests.conftest import REPOSITORY
from tests.data.helpers import cut, files_in, user_error

# ---- folders -------------------------------------------------------------------------------------


def write(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4), seed: int = 0) -> np.ndarray:
    """A random image of `size` (width, height) at `path`; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_folder(root: Path, mode: str = "RGB") -> None:
    """A folder of 2 classes, 3 training and 1 test images each."""
    names = [f"train/{c}/{i}.png" for c in ("cat", "ant") for i in range(3)] + ["test/cat/0.png", "test/ant/0.png"]
    for i, name in enumerate(names):
        write(root / name, mode, seed=i)


@pytest.fixture
def pets(tmp_path) -> Path:
    write_folder(tmp_path / "pets")
    return tmp_path / "pets"


def source(root: Path, image_size: int | None = None) -> DecodedImages:
    found = open_images("", root.parent / "data", root, image_size)
    assert isinstance(found, DecodedImages)
    return found


def require_as_torchvisions_image_folder(root: Path, mode: str = "RGB") -> None:
    """The same pixels and labels, in the same order."""
    for split in ("train", "test"):
        images, labels = source(root).load(split)
        oracle = datasets.ImageFolder(root / split, loader=lambda path: np.atleast_3d(Image.open(path).convert(mode)))
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack([image for image, _ in oracle]))
        assert labels.tolist() == oracle.targets


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_formats_and_nested_folders_are_read_to_the_pixel(tmp_path, mode, channels):
    root = tmp_path / "pets"
    write_folder(root, mode)
    for i, name in enumerate(["a.bmp", "b.JPG", "sub/c.tiff", "sub-2/d.png"]):
        write(root / "train/ant" / name, mode, seed=20 + i)
    (root / "train/ant/notes.txt").write_text("no image")
    pets = source(root)
    assert (pets.name, pets.classes, pets.shape) == ("pets", ["ant", "cat"], (channels, 4, 5))
    assert len(pets.load("train")[1]) == 10
    require_as_torchvisions_image_folder(root, mode)


def test_a_folder_is_coloured_if_any_image_is(pets):
    grey = write(pets / "train/cat/9.png", "L")
    assert np.array_equal(source(pets).load("train")[0][-1].numpy(), np.stack([grey] * 3))


@pytest.mark.parametrize("size", [(40, 20), (20, 41), (33, 70), (8, 8), (5, 3)])
def test_the_centre_is_kept_and_the_shorter_side_becomes_image_size(pets, size):
    pixels = write(pets / "train/ant/0.png", size=size)
    side = min(size)
    left, top = (size[0] - side) / 2, (size[1] - side) / 2
    square = Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    images, _ = source(pets, image_size=16).load("train")
    assert images.shape[1:] == (3, 16, 16)
    assert np.abs(images[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(square)).max() <= 1


def test_val_is_a_split_of_its_own_and_classes_are_those_of_train(pets):
    """A split may lack a class."""
    pixels = write(pets / "val/cat/0.png", seed=77)
    write(pets / "train/bee/0.png")
    images, labels = source(pets).load("val")
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), pixels)
    assert labels.tolist() == [2]
    assert source(pets).load("test")[1].tolist() == [0, 2]


MISTAKES = {
    "no root": (lambda p: shutil.rmtree(p), ""),
    "no test": (lambda p: shutil.rmtree(p / "test"), ""),
    "empty class": (lambda p: [image.unlink() for image in (p / "train/cat").iterdir()], ""),
    "stranger": (lambda p: write(p / "test/zebu/0.png"), "test/zebu"),
    "cut": (lambda p: cut(p / "train/cat/1.png", 0.7), "train/cat/1.png"),
    "no image": (lambda p: (p / "train/cat/1.png").write_text("%!PS-Adobe-3.0 EPSF-3.0"), "train/cat/1.png"),
    "size": (lambda p: write(p / "train/cat/1.png", size=(4, 5)), "train/cat/1.png"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_path(pets, mistake):
    spoil, path = MISTAKES[mistake]
    spoil(pets)
    assert str(pets / path) in user_error(lambda: source(pets).prepare())
    assert not [*pets.parent.rglob("*.pt")]


@pytest.mark.parametrize("change", ["pixels", "added", "removed", "moved", "cache"])
def test_a_changed_file_or_a_damaged_cache_is_decoded_again(pets, change):
    for path in pets.rglob("*.png"):
        os.utime(path, (1, 1))
    source(pets).prepare()
    train = pets / "train"
    if change == "pixels":
        write(train / "ant/0.png", seed=99)
    elif change == "added":
        write(train / "ant/9.png")
    elif change == "removed":
        (train / "ant/2.png").unlink()
    elif change == "moved":
        (train / "ant/2.png").rename(train / "cat/9.png")
    else:
        cut(next(pets.parent.rglob("*.pt")), 0.999)
    require_as_torchvisions_image_folder(pets)


# ---- torchvision's data sets ---------------------------------------------------------------------


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


@pytest.mark.usefixtures("offline", "raw")
def test_mnist_files_are_read_where_torchvision_keeps_them(tmp_path):
    mnist = open_images("mnist", tmp_path / "data")
    assert (mnist.name, mnist.classes, mnist.shape) == ("mnist", list("0123456789"), (1, 28, 28))
    mnist.prepare()
    for split, file in (("train", "train"), ("test", "t10k")):
        images, labels = mnist.load(split)
        assert images.dtype == torch.uint8
        assert np.array_equal(images.numpy(), mnist_files()[f"{file}-images-idx3-ubyte"][:, None])
        assert labels.dtype == torch.int64
        assert np.array_equal(labels.numpy(), mnist_files()[f"{file}-labels-idx1-ubyte"])


@pytest.mark.usefixtures("offline")
def test_cifar_batches_become_channels_first(tmp_path, monkeypatch):
    """CIFAR's rows are plane by plane."""
    rows = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    folder = tmp_path / "data/cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, _ in datasets.CIFAR10.train_list + datasets.CIFAR10.test_list:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [3, 9]}))
    cifar = open_images("cifar10", tmp_path / "data")
    assert "--data_dir" in user_error(cifar.prepare)  # these are not the published files
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    cifar.prepare()
    images, labels = cifar.load("test")
    assert images.is_contiguous()
    assert np.array_equal(images.numpy(), rows.reshape(2, 3, 32, 32))
    assert labels.tolist() == [3, 9]
    assert cifar.load("train")[0].shape == (10, 3, 32, 32)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("content", [None, b"", b"\0\0\x08\x03" + bytes(20)])
def test_a_missing_or_broken_file_without_network(tmp_path, raw, content):
    before = files_in(tmp_path / "data")
    (raw / "t10k-labels-idx1-ubyte").unlink()
    if content is not None:
        (raw / "t10k-labels-idx1-ubyte").write_bytes(content)
    message = user_error(open_images("mnist", tmp_path / "data").prepare)
    assert f"mnist in {tmp_path}/data" in message
    assert "--data_dir" in message
    assert files_in(tmp_path / "data") <= before


def test_open_images_chooses(tmp_path):
    write_folder(tmp_path / "pets")
    write_folder(tmp_path / "data/cifar10")
    assert open_images("mnist", tmp_path / "data", tmp_path / "pets").name == "pets"
    assert isinstance(open_images("cifar10", tmp_path / "data"), DecodedImages)
    (tmp_path / "data/cifar10").rename(tmp_path / "elsewhere")
    (tmp_path / "data/cifar10").symlink_to(tmp_path / "elsewhere")
    assert open_images("cifar10", tmp_path / "data").name == "cifar10", "a linked folder"
    assert isinstance(open_images("cifar100", tmp_path / "data"), KnownImages)
    assert "'cifar10'" in user_error(lambda: open_images("cifar_10", tmp_path / "data"))


def test_a_set_of_ones_own_is_one_entry(tmp_path, monkeypatch):
    """As the guide has it."""
    page = (REPOSITORY / "docs/guides/images.md").read_text()
    code = re.search(r"```python\n(import torch\nfrom torchvision.*?)```", page, re.DOTALL)[1]
    exec(code, names := {"__name__": "my_svhn"})
    pixels, labels = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8), np.arange(20) % 10
    monkeypatch.setattr(datasets, "SVHN", lambda root, split, download: SimpleNamespace(data=pixels, labels=labels))
    data = names["HouseNumbers"](dataset="svhn", data_dir=str(tmp_path), val_size=0.5)
    data.setup("fit")
    assert np.array_equal(data.splits["test"][0].numpy(), pixels)
    assert data.splits["test"][1].tolist() == labels.tolist()
    assert (data.spec["classes"], data.spec["mean"]) == ([*"0123456789"], [0.4377, 0.4438, 0.4728])
    assert (names["HouseNumbers"].chance("svhn"), data.task_name) == (0.1, "svhn")
