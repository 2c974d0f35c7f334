"""Image classification data sets as whole uint8 tensors: folders of images, and torchvision's data sets."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import extract_archive

from kvt.data.download import Remote, fetch, is_sound, network
from kvt.data.image_folder import FolderSource
from kvt.data.image_source import ImageSource, Shape
from kvt.data.tensor_cache import ELSEWHERE, data_lock
from kvt.system.errors import unknown


def open_images(dataset: str, data_dir: Path, root: Path | None = None) -> ImageSource:
    """Return the image folder `root`, else `data_dir/dataset` if that is one, else torchvision's `dataset`.

    Raises UserError for an unknown `dataset` and for a folder without class folders.
    """
    if root is not None:
        return FolderSource(root, data_dir)
    if dataset not in PUBLISHED:
        raise unknown("data set", dataset, PUBLISHED)
    folder = data_dir / dataset
    if os.path.isdir(folder / "train"):
        return FolderSource(folder, data_dir)
    return TorchvisionSource(dataset, data_dir)


class Published(NamedTuple):
    """A published data set: its properties and its archives by file name."""

    dataset: type[datasets.VisionDataset]
    classes: list[str]
    shape: Shape
    folder: str
    archives: dict[str, Remote]


def _mnist(dataset: type[datasets.MNIST], classes: list[str], url: str, hashes: list[str]) -> Published:
    names = [f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    archives = {name: Remote(f"{url}/{name}", sha256) for name, sha256 in zip(names, hashes, strict=True)}
    return Published(dataset, classes, (1, 28, 28), f"{dataset.__name__}/raw", archives)


def _cifar(dataset: type[datasets.CIFAR10], classes: list[str], sha256: str) -> Published:
    remote = Remote(f"https://www.cs.toronto.edu/~kriz/{dataset.filename}", sha256)
    return Published(dataset, classes, (3, 32, 32), "", {dataset.filename: remote})


CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PUBLISHED = {
    "mnist": _mnist(
        datasets.MNIST,
        [str(i) for i in range(10)],
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        [
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ],
    ),
    "fashion_mnist": _mnist(
        datasets.FashionMNIST,
        datasets.FashionMNIST.classes,
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
        "/data/fashion",
        [
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ],
    ),
    "cifar10": _cifar(
        datasets.CIFAR10, CIFAR10_CLASSES, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    ),
    "cifar100": _cifar(
        datasets.CIFAR100,
        [str(i) for i in range(100)],
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
}


class TorchvisionSource(ImageSource):
    """A published data set where torchvision keeps it under `data_dir`, downloaded if it is not there."""

    def __init__(self, name: str, data_dir: Path) -> None:
        self.name = self.fingerprint = name
        self.data_dir = data_dir
        self._published = PUBLISHED[name]
        self.classes, self.shape = self._published.classes, self._published.shape

    def prepare(self) -> None:
        """Download and unpack what is missing or broken; see `ImageSource.prepare`."""
        if not self._is_whole():
            self._download()

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """See `ImageSource.load`. Raises ValueError if the data are not of the published shape."""
        data = self._published.dataset(self.data_dir, train={"train": True, "test": False}[split])
        images, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)  # MNIST: (N, H, W)
        if images.shape[1:] != self.shape or len(images) != len(labels):
            raise ValueError(f"{self.name}: {tuple(images.shape)}, {len(labels)} labels")
        return images, labels

    def _is_whole(self) -> bool:
        try:
            self.load("train")
            self.load("test")
        except Exception:  # torchvision raises exceptions of many types for files that are missing or broken
            return False
        return True

    def _download(self) -> None:
        folder = self.data_dir / self._published.folder
        archives, images = ", ".join(self._published.archives), self.data_dir / self.name
        remedy = (
            f"put {archives} there afresh, or images into {images}/train/<class>/ and {images}/test/<class>/, "
            f"or {ELSEWHERE}"
        )
        with network(f"{self.name} is missing or broken in {folder}", remedy), data_lock(self.data_dir):
            if self._is_whole():  # another process fetched it while this one waited
                return
            folder.mkdir(parents=True, exist_ok=True)
            for name, remote in self._published.archives.items():
                if not is_sound(folder / name, remote):
                    fetch(remote, folder / name)
                extract_archive(os.fspath(folder / name))
            if not self._is_whole():
                raise OSError("the unpacked files cannot be read")
