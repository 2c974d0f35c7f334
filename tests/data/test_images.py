import gzip
import hashlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from kvt.data import download
from kvt.data import images as module
from kvt.data import tensor_cache as cache
from kvt.data.images import FolderSource, TorchvisionSource, open_images
from kvt.system.errors import UserError

fork = multiprocessing.get_context("fork")  # children start in milliseconds and inherit what a test patched


def write(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4), seed: int = 0) -> np.ndarray:
    """A random image of `size` (width, height) at `path`; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_folder(root: Path, mode: str = "RGB") -> dict[str, np.ndarray]:
    """A folder of 2 classes, 3 training and 1 test images each; returns the pixels by relative path."""
    names = [f"train/{c}/{i}.png" for c in ("cat", "ant") for i in range(3)] + [
        "test/cat/0.png",
        "test/ant/0.png",
    ]
    return {name: write(root / name, mode, seed=i) for i, name in enumerate(names)}


def source(tmp_path: Path) -> FolderSource:
    return FolderSource(tmp_path / "pets", tmp_path / "data")


def cache_files(tmp_path: Path, pattern: str = "*.pt") -> list[Path]:
    return sorted((tmp_path / "data" / ".cache").glob(pattern))


def user_error(action) -> str:
    """The message of the UserError that `action` raises, checked to be one line."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_a_folder_comes_back_to_the_pixel(tmp_path, mode, channels):
    pixels = write_folder(tmp_path / "pets", mode)
    pets = source(tmp_path)
    assert (pets.name, pets.classes, pets.shape) == ("pets", ["ant", "cat"], (channels, 4, 5))
    pets.prepare()
    for split, count in (("train", 3), ("test", 1)):
        images, labels = pets.load(split)
        names = [f"{split}/{c}/{i}.png" for c in ("ant", "cat") for i in range(count)]
        expected = np.stack([np.atleast_3d(pixels[name]).transpose(2, 0, 1) for name in names])
        assert images.dtype == torch.uint8
        assert np.array_equal(images.numpy(), expected)
        assert labels.dtype == torch.int64
        assert labels.tolist() == [0] * count + [1] * count


def test_formats_and_nested_folders_as_torchvisions_image_folder(tmp_path):
    write_folder(tmp_path / "pets")
    for i, name in enumerate(["a.bmp", "b.JPG", "sub/c.tiff", "notes.txt"]):
        write(tmp_path / "pets/train/ant" / (name if i < 3 else "d.png"), seed=20 + i)
    (tmp_path / "pets/train/ant/notes.txt").write_text("no image")
    pets = source(tmp_path)
    pets.prepare()
    oracle = datasets.ImageFolder(tmp_path / "pets/train")
    images, labels = pets.load("train")
    assert len(oracle) == 10
    expected = np.stack([np.asarray(image) for image, _ in oracle])
    assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), expected)
    assert labels.tolist() == oracle.targets


def test_grey_images_in_a_colour_folder_become_rgb(tmp_path):
    write_folder(tmp_path / "pets")
    grey = write(tmp_path / "pets/train/cat/9.png", "L")
    pets = source(tmp_path)
    pets.prepare()
    assert np.array_equal(pets.load("train")[0][-1].numpy(), np.stack([grey] * 3))


def test_a_class_without_test_images_is_allowed(tmp_path):
    write_folder(tmp_path / "pets")
    write(tmp_path / "pets/train/bee/0.png")
    pets = source(tmp_path)
    pets.prepare()
    assert pets.load("test")[1].tolist() == [0, 2]


def test_decodes_once(tmp_path, monkeypatch):
    write_folder(tmp_path / "pets")
    source(tmp_path).prepare()

    def fail(*_):
        raise AssertionError("decoded twice")

    monkeypatch.setattr(FolderSource, "_decode", fail)
    monkeypatch.setattr(cache, "only_process", fail)  # a cache is used where nothing can be written
    pets = source(tmp_path)
    pets.prepare()
    assert pets.load("train")[0].shape == (6, 3, 4, 5)


@pytest.mark.parametrize("change", ["pixels", "added", "removed", "moved"])
def test_a_changed_file_is_decoded_again(tmp_path, change):
    write_folder(tmp_path / "pets")
    for path in (tmp_path / "pets").rglob("*.png"):
        os.utime(path, (1, 1))
    source(tmp_path).prepare()
    train = tmp_path / "pets/train"
    if change == "pixels":
        new = write(train / "ant/0.png", seed=99)
    elif change == "added":
        write(train / "ant/9.png")
    elif change == "removed":
        (train / "ant/2.png").unlink()
    else:
        (train / "ant/2.png").rename(train / "cat/9.png")
    pets = source(tmp_path)
    pets.prepare()
    images, labels = pets.load("train")
    ants = {"pixels": 3, "added": 4, "removed": 2, "moved": 2}[change]
    assert labels.tolist() == [0] * ants + [1] * (4 if change == "moved" else 3)
    if change == "pixels":
        assert np.array_equal(images[0].permute(1, 2, 0).numpy(), new)


def test_equal_folders_elsewhere_have_caches_of_their_own(tmp_path):
    for where in ("here", "there"):
        write_folder(tmp_path / where / "pets")
        for file in (tmp_path / where).rglob("*.png"):
            os.utime(file, (1, 1))
        FolderSource(tmp_path / where / "pets", tmp_path / "data").prepare()
    assert len(cache_files(tmp_path)) == 2


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_cut_cache_is_built_anew(tmp_path, keep):
    write_folder(tmp_path / "pets")
    source(tmp_path).prepare()
    before = source(tmp_path).load("train")[0]
    [cache] = cache_files(tmp_path)
    cache.write_bytes(cache.read_bytes()[: int(keep * cache.stat().st_size)])
    source(tmp_path).prepare()
    assert torch.equal(source(tmp_path).load("train")[0], before)


def run_twice_at_once(work):
    processes = [fork.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]


def test_two_processes_decode_once(tmp_path, monkeypatch):
    write_folder(tmp_path / "pets")
    start, decoded, loaded = fork.Barrier(2), fork.Value("i", 0), fork.Value("i", 0)
    decode = FolderSource._decode

    def counted(self, split):
        with decoded.get_lock():
            decoded.value += 1
        time.sleep(0.2)  # long enough for the other process to arrive
        return decode(self, split)

    def work():
        torch.set_num_threads(1)
        start.wait()
        pets = source(tmp_path)
        pets.prepare()
        with loaded.get_lock():
            loaded.value += len(pets.load("train")[0])

    monkeypatch.setattr(FolderSource, "_decode", counted)
    run_twice_at_once(work)
    assert decoded.value == 2  # train and test, by one of them
    assert loaded.value == 12


def kill_where_it_stalls(work):
    """Runs work(stall) in a process of its own, which is killed as soon as it calls the stall."""
    reached = fork.Event()

    def stall(*_):
        reached.set()
        time.sleep(60)

    process = fork.Process(target=work, args=(stall,))
    process.start()
    assert reached.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["decoding", "saving"])
def test_a_killed_process_leaves_nothing_in_the_way(tmp_path, monkeypatch, moment):
    write_folder(tmp_path / "pets")

    def work(stall):
        torch.set_num_threads(1)
        monkeypatch.setattr(*((FolderSource, "_decode") if moment == "decoding" else (os, "replace")), stall)
        source(tmp_path).prepare()

    kill_where_it_stalls(work)
    assert len(cache_files(tmp_path, "*.tmp")) == (moment == "saving")
    assert not cache_files(tmp_path)

    # A new fingerprint: the leftover belongs to the old one, and goes all the same.
    write(tmp_path / "pets/train/ant/9.png")
    source(tmp_path).prepare()
    assert len(source(tmp_path).load("train")[0]) == 7
    assert not cache_files(tmp_path, "*.tmp")


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    write_folder(tmp_path / "pets")
    save = torch.save

    def out_of_space(tensors, path):
        save(tensors, path)
        raise RuntimeError("unexpected pos 832 vs 726\nstack")

    monkeypatch.setattr(torch, "save", out_of_space)
    assert f"cannot write in {tmp_path / 'data/.cache'}" in user_error(source(tmp_path).prepare)
    assert not cache_files(tmp_path, "*.pt*")


def test_a_data_dir_that_cannot_be_written(tmp_path):
    write_folder(tmp_path / "pets")
    (tmp_path / "data").write_text("a file where the folder should be")
    message = user_error(source(tmp_path).prepare)
    assert str(tmp_path / "data") in message
    assert "--data_dir" in message


# Each: what is done to the good folder `pets`, the path the message names, and words of the remedy.
def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _replace_by_file(folder: Path) -> None:
    _empty(folder)
    folder.rmdir()
    folder.write_text("")


def _remove(folder: Path) -> None:
    _empty(folder)
    folder.rmdir()


MISTAKES = {
    "no root": (_remove, "", "missing: name a folder of train/ and test/"),
    "root is a file": (_replace_by_file, "", "a file, not a folder"),
    "no train": (lambda p: _remove(p / "train"), "train", "missing: put one folder of images per class"),
    "no test": (lambda p: _remove(p / "test"), "test", "missing: put one folder of images per class"),
    "train is a file": (lambda p: _replace_by_file(p / "train"), "train", "a file, not a folder"),
    "no classes": (lambda p: _empty(p / "train"), "train", "has no class folders"),
    "no test classes": (lambda p: _empty(p / "test"), "test", "has no class folders"),
    "empty class": (lambda p: _empty(p / "train/cat"), "train/cat", "has no image: put some there (.jpg"),
    "empty test class": (lambda p: _empty(p / "test/cat"), "test/cat", "has no image: put some there (.jpg"),
    "stranger": (lambda p: write(p / "test/zebu/0.png"), "test/zebu", "is no class of"),
    "first broken": (
        lambda p: (p / "train/ant/0.png").write_text("?"),
        "train/ant/0.png",
        "replace or remove it",
    ),
    "dead link": (lambda p: (p / "test/cat/9.png").symlink_to("gone"), "test/cat/9.png", "replace or remove"),
    "cut": (lambda p: _cut(p / "train/cat/1.png"), "train/cat/1.png", "replace or remove it"),
    "cut test": (lambda p: _cut(p / "test/cat/0.png"), "test/cat/0.png", "replace or remove it"),
    "size": (lambda p: write(p / "train/cat/1.png", size=(4, 5)), "train/cat/1.png", "is 4x5,"),
    "colour": (lambda p: write(p / "train/ant/0.png", "L"), "train/ant/1.png", "is in colour"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_that_names_the_path(tmp_path, mistake):
    spoil, path, remedy = MISTAKES[mistake]
    write_folder(tmp_path / "pets")
    spoil(tmp_path / "pets")
    message = user_error(lambda: source(tmp_path).prepare())
    assert message.startswith(f"{tmp_path / 'pets' / path} ")
    assert remedy in message
    assert not cache_files(tmp_path)


def test_the_first_odd_size_is_named_with_both_sizes(tmp_path):
    write_folder(tmp_path / "pets")
    for name in ("ant/2", "cat/0"):
        write(tmp_path / f"pets/train/{name}.png", size=(7, 4))
    message = user_error(source(tmp_path).prepare)
    ants = tmp_path / "pets/train/ant"
    assert message.startswith(f"{ants}/2.png is 7x4, {ants}/0.png is 5x4: resize")


# ---- published sets ------------------------------------------------------------------------------


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


@pytest.fixture
def _offline(monkeypatch):
    def unreachable(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)


@pytest.mark.usefixtures("_offline")
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
    name, md5 = put("batches.meta", {"label_names": module.CIFAR10_CLASSES})
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return folder


@pytest.mark.usefixtures("_offline")
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


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize(
    ("name", "file", "folder"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", "MNIST/raw"),
        ("fashion_mnist", "t10k-labels-idx1-ubyte.gz", "FashionMNIST/raw"),
        ("cifar10", "cifar-10-python.tar.gz", ""),
        ("cifar100", "cifar-100-python.tar.gz", ""),
    ],
)
def test_no_data_and_no_network_says_what_to_put_where(tmp_path, capfd, name, file, folder):
    message = user_error(open_images(name, tmp_path / "data").prepare)
    assert f"{name} is missing or broken in {tmp_path / 'data' / folder} " in message
    assert file in message
    assert f"{tmp_path}/data/{name}/train/<class>/" in message
    assert "Name or service not known" in message
    assert "--data_dir" in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_offline")
@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x08\x03" + bytes(20)])
def test_a_broken_file_without_archive_or_network(tmp_path, raw, content):
    (raw / "t10k-images-idx3-ubyte").write_bytes(content)
    message = user_error(open_images("mnist", tmp_path / "data").prepare)
    assert message.startswith(f"mnist is missing or broken in {raw} ")


def archives(raw: Path, monkeypatch) -> dict[str, bytes]:
    """The files there as archives; what is known of MNIST is set to them, at "<url>/<name>"."""
    packed = {f"{path.name}.gz": gzip.compress(path.read_bytes()) for path in sorted(raw.iterdir())}
    remotes = {
        name: download.Remote(f"<url>/{name}", hashlib.sha256(content).hexdigest(), len(content))
        for name, content in packed.items()
    }
    monkeypatch.setitem(module.PUBLISHED, "mnist", module.PUBLISHED["mnist"]._replace(archives=remotes))
    return packed


@pytest.mark.usefixtures("_offline")
def test_half_unpacked_files_are_unpacked_again_from_their_archives(tmp_path, raw, monkeypatch):
    for name, content in archives(raw, monkeypatch).items():
        (raw / name).write_bytes(content)
        unpacked = (raw / name).with_suffix("")
        unpacked.write_bytes(unpacked.read_bytes()[:-3])  # what a process killed while unpacking leaves
    mnist = open_images("mnist", tmp_path / "data")
    mnist.prepare()
    assert np.array_equal(mnist.load("test")[0].numpy(), mnist_files()["t10k-images-idx3-ubyte"][:, None])


def test_one_of_two_processes_downloads(tmp_path, raw, monkeypatch):
    packed = archives(raw, monkeypatch)
    hidden = raw.rename(tmp_path / "server")
    start, downloads = fork.Barrier(2), fork.Value("i", 0)

    def fetch(remote, path):
        with downloads.get_lock():
            downloads.value += 1
        time.sleep(0.1)  # long enough for the other process to arrive
        path.write_bytes(packed[path.name])

    def work():
        start.wait()
        mnist = TorchvisionSource("mnist", tmp_path / "data")
        mnist.prepare()
        assert len(mnist.load("train")[0]) == 5

    monkeypatch.setattr(module, "fetch", fetch)
    run_twice_at_once(work)
    assert downloads.value == len([*hidden.iterdir()])


def test_a_silent_network_times_out(tmp_path, monkeypatch):
    """A server that accepts and says nothing, as behind a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        cifar = module.PUBLISHED["cifar10"]
        (name, remote), *_ = cifar.archives.items()
        silent = {name: remote._replace(url=f"https://127.0.0.1:{server.getsockname()[1]}/{name}")}
        monkeypatch.setitem(module.PUBLISHED, "cifar10", cifar._replace(archives=silent))
        monkeypatch.setattr(download, "SILENCE", 0.2)
        assert "timed out" in user_error(open_images("cifar10", tmp_path / "data").prepare)


def test_open_images_chooses(tmp_path):
    write_folder(tmp_path / "pets")
    write_folder(tmp_path / "data/cifar10")
    assert open_images("mnist", tmp_path / "data", tmp_path / "pets").name == "pets"
    assert isinstance(open_images("cifar10", tmp_path / "data"), FolderSource)
    assert isinstance(open_images("cifar100", tmp_path / "data"), TorchvisionSource)
    assert "did you mean 'cifar10'?" in user_error(lambda: open_images("cifar_10", tmp_path / "data"))


@pytest.mark.real
@pytest.mark.parametrize(
    ("dataset", "root", "classes", "train", "test"),
    [
        ("mnist", None, 10, 60_000, 10_000),
        ("fashion_mnist", None, 10, 60_000, 10_000),
        ("cifar10", "cifar10-small", 10, None, None),
        ("cifar100", "cifar100-small", 100, None, None),
    ],
)
def test_real_data(dataset, root, classes, train, test):
    folder = Path(os.environ["KVT_DATA_DIR"])
    found = open_images(dataset, folder, root and folder / root)
    found.prepare()
    for split, count in (("train", train), ("test", test)):
        images, labels = found.load(split)
        assert images.shape[1:] == found.shape
        assert count in (None, len(images))
        assert labels.unique().tolist() == list(range(classes))
