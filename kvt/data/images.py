"""Image classification data sets as whole uint8 tensors: folders of images, and torchvision's own sets."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.datasets.utils import check_integrity
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from kvt.data.cache import make_once
from kvt.data.download import ELSEWHERE, network, only_process
from kvt.errors import UserError, unknown

Shape = tuple[int, int, int]


class ImageSource(ABC):
    """Where an image classification data set comes from.

    `name`, `fingerprint` (tells it from any other), `classes` (sorted as the labels count) and `shape` (channels,
    height, width) are known at once.
    """

    name: str
    fingerprint: str
    classes: list[str]
    shape: Shape

    @abstractmethod
    def prepare(self) -> None:
        """Downloads or decodes whatever `load` needs, once; harmless to repeat, to race and to kill.

        Raises UserError for data that is missing, broken or cannot be stored.
        """

    @abstractmethod
    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """The images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test", after `prepare`."""


def open_images(dataset: str, data_dir: Path, root: Path | None = None) -> ImageSource:
    """The image folder `root`, else `data_dir/dataset` if that is one, else torchvision's `dataset`.

    Raises UserError for an unknown `dataset` and for a folder that is no image folder.
    """
    if root is not None:
        return FolderSource(root, data_dir)
    if dataset not in PUBLISHED:
        raise unknown("data set", dataset, PUBLISHED)
    folder = data_dir / dataset
    if (folder / "train").is_dir():
        return FolderSource(folder, data_dir)
    return TorchvisionSource(dataset, data_dir)


class FolderSource(ImageSource):
    """Images in `root/{train,test}/<class>/`, all of one size, as torchvision's ImageFolder lists them.

    One channel if the first training image is greyscale, else RGB. The decoded tensors are kept in
    `data_dir/.cache` under the hash of every file's path, size and time, so a changed file is a new entry;
    that folder may be deleted at any time. Raises UserError, naming the path, for whatever is amiss with
    the folder; all images but the first are opened by `prepare` only.
    """

    def __init__(self, root: Path, data_dir: Path) -> None:
        self.root = root.resolve()
        self.data_dir = data_dir
        self.name = self.root.name
        _require_folder(self.root, "name a folder of train/ and test/, each with one folder per class")

        self.classes = _class_folders(self.root / "train")
        label = {name: i for i, name in enumerate(self.classes)}
        self._files = {"train": _list_images(self.root / "train", label)}
        shared = _class_folders(self.root / "test")
        if strangers := [name for name in shared if name not in label]:
            stranger = self.root / "test" / strangers[0]
            raise UserError(f"{stranger} is no class of {self.root / 'train'}: add or remove it")
        self._files["test"] = _list_images(self.root / "test", {name: label[name] for name in shared})

        self._first = self._files["train"][0][0]
        with _opened(self._first) as image:
            self._mode = "L" if _is_grey(image) else "RGB"
            self.shape = (len(self._mode), image.height, image.width)
        self.fingerprint = f"{self.name}-{self._hash()}"
        self._cache = self.data_dir / ".cache" / f"{self.fingerprint}.pt"

    def prepare(self) -> None:
        """Decodes all images into the cache unless they are there; see `ImageSource.prepare`."""
        make_once(self._cache, self.data_dir, lambda: {split: self._decode(split) for split in self._files})

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """See `ImageSource.load`."""
        images, labels = torch.load(self._cache, weights_only=True, mmap=True)[split]
        return images.clone(), labels.clone()

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for files in self._files.values():
            for path, _ in files:
                try:
                    stat = os.stat(path)
                except OSError as error:  # a link to nowhere
                    raise _unreadable(path, error) from error
                digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # One thread: PIL holds Python's lock for most of a small image, and two threads were half as fast.
        files = self._files[split]
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, (path, _) in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            images[i] = self._read(path)
        return images, torch.tensor([label for _, label in files])

    def _read(self, path: str) -> Tensor:
        _, height, width = self.shape
        with _opened(path) as image:
            if image.size != (width, height):
                raise UserError(
                    f"{path} is {image.width}x{image.height}, {self._first} is {width}x{height}: "
                    "resize all images to one size"
                )
            if self._mode == "L" and not _is_grey(image):
                raise UserError(f"{path} is in colour, {self._first} is greyscale: save the latter as RGB")
            return pil_to_tensor(image.convert(self._mode))


class Published(NamedTuple):
    """What is known of a published data set before it is downloaded, and the files its authors offer."""

    dataset: type[datasets.VisionDataset]
    classes: list[str]
    shape: Shape
    folder: str
    archives: dict[str, str]  # name -> md5


def _mnist(dataset: type[datasets.MNIST], classes: list[str]) -> Published:
    return Published(dataset, classes, (1, 28, 28), f"{dataset.__name__}/raw", dict(dataset.resources))


def _cifar(dataset: type[datasets.CIFAR10], classes: list[str]) -> Published:
    return Published(dataset, classes, (3, 32, 32), "", {dataset.filename: dataset.tgz_md5})


CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PUBLISHED = {
    "mnist": _mnist(datasets.MNIST, [str(i) for i in range(10)]),
    "fashion_mnist": _mnist(datasets.FashionMNIST, datasets.FashionMNIST.classes),
    "cifar10": _cifar(datasets.CIFAR10, CIFAR10_CLASSES),
    "cifar100": _cifar(datasets.CIFAR100, [str(i) for i in range(100)]),
}


class TorchvisionSource(ImageSource):
    """A published data set, where torchvision keeps it under `data_dir`, downloaded if it is not there."""

    def __init__(self, name: str, data_dir: Path) -> None:
        self.name = self.fingerprint = name
        self.data_dir = data_dir
        self._published = PUBLISHED[name]
        self.classes, self.shape = self._published.classes, self._published.shape

    def prepare(self) -> None:
        """Downloads and unpacks what is missing or broken; see `ImageSource.prepare`."""
        if self._is_whole():
            return
        with only_process(self.data_dir):
            if not self._is_whole():
                self._download()

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """See `ImageSource.load`."""
        data = self._published.dataset(self.data_dir, train={"train": True, "test": False}[split])
        images = torch.as_tensor(data.data)  # MNIST: (N, H, W); CIFAR: (N, H, W, C)
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
        return images, torch.as_tensor(data.targets)

    def _is_whole(self) -> bool:
        try:
            self.load("train")
            self.load("test")
        except Exception:  # torchvision raises nearly anything, from asserts to zlib's errors
            return False
        return True

    def _download(self) -> None:
        folder = self.data_dir / self._published.folder
        # torchvision checks MNIST's archives but not what it unpacked: a killed process may have left half.
        for name, md5 in self._published.archives.items():
            if name.endswith("-ubyte.gz") and check_integrity(folder / name, md5):
                (folder / name).with_suffix("").unlink(missing_ok=True)
        archives, images = ", ".join(self._published.archives), self.data_dir / self.name
        remedy = (
            f"put {archives} there afresh, or images into {images}/train/<class>/ and {images}/test/<class>/, "
            f"or {ELSEWHERE}"
        )
        with network(f"{self.name} is missing or broken in {folder}", remedy):
            self._published.dataset(self.data_dir, download=True)
            self.load("test")


def _require_folder(path: Path, remedy: str) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is {'a file, not a folder' if path.exists() else 'missing'}: {remedy}")


def _class_folders(folder: Path) -> list[str]:
    remedy = "put one folder of images per class there"
    _require_folder(folder, remedy)
    try:
        classes = [name for name in find_classes(folder)[0] if not name.startswith(".")]
    except FileNotFoundError:
        classes = []
    if not classes:
        raise UserError(f"{folder} has no class folders: {remedy}")
    return classes


def _list_images(folder: Path, label: dict[str, int]) -> list[tuple[str, int]]:
    """(path, label) of the images of each class, in order of path."""
    files = make_dataset(folder, label, IMG_EXTENSIONS, allow_empty=True)
    seen = {i for _, i in files}
    for name, i in label.items():
        if i not in seen:
            formats = " ".join(IMG_EXTENSIONS)
            raise UserError(f"{folder / name} has no image: put some there ({formats}) or remove it")
    return files


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA")


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except UserError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, ... according to what is broken
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"{path} is no readable image ({error}): replace or remove it")
