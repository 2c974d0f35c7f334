"""Image classification data sets as whole uint8 tensors: folders of images, and torchvision's data sets."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.datasets.utils import extract_archive
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from kvt.data.download import Remote, fetch, network
from kvt.data.tensor_files import ELSEWHERE, SPLITS, cache_splits, once, read_splits
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file

GREY = ("1", "L", "LA")  # modes of PIL
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""The formats of IMG_EXTENSIONS. PIL guesses from the content and would start Ghostscript for a PostScript file."""


def open_images(dataset: str, data_dir: Path, root: Path | None = None) -> "FolderSource | TorchvisionSource":
    """Return the image folder `root`, else `data_dir/dataset` if that is one, else torchvision's `dataset`."""
    if root is not None:
        return FolderSource(root, data_dir)
    if dataset not in PUBLISHED:
        raise unknown("data set", dataset, PUBLISHED)
    folder = data_dir / dataset
    return FolderSource(folder, data_dir) if os.path.isdir(folder / "train") else TorchvisionSource(dataset, data_dir)


class FolderSource:
    """Images in `root/{train,test}/<class>/`, all of one size, in the order of torchvision's ImageFolder.

    One channel if the first training image is greyscale, else RGB. Of a file with several frames the first is taken;
    EXIF orientation is ignored. The decoded tensors are cached in `data_dir/.cache` under a hash of every file's path,
    size and modification time. All images but the first are opened by `prepare` only.
    """

    def __init__(self, root: Path, data_dir: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.name = self.root.name
        try:
            self.classes, label = find_classes(self.root / "train")
            self._files = {}
            for split in SPLITS:
                names, _ = find_classes(self.root / split)
                if strangers := [name for name in names if name not in label]:
                    raise UserError(f"{self.root / split / strangers[0]} is not a class of train/: add or remove it")
                classes = {name: label[name] for name in names}
                self._files[split] = make_dataset(self.root / split, classes, IMG_EXTENSIONS)
        except OSError as error:
            raise UserError(f"{root} needs train/<class>/ and test/<class>/: {error}") from error

        digest = hashlib.sha256()
        for path, _ in self._files["train"] + self._files["test"]:
            require_file(path, "replace or remove it")
            stat = os.stat(path)
            digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        content = digest.hexdigest()[:16]
        self.fingerprint = f"{self.name}-{content}"
        self._cache = data_dir / ".cache" / f"{self.name:.40}-{content}.pt"
        self._first = self._files["train"][0][0]
        image = read_image(self._first)
        self._mode = "L" if image.mode in GREY else "RGB"
        self.shape = (len(self._mode), image.height, image.width)

    def prepare(self) -> None:
        """Decode all images into the cache unless they are there; safe in several processes at once."""
        cache_splits(self._cache, lambda: {split: self._decode(split) for split in SPLITS}, read_splits)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test", after `prepare`."""
        images, labels = read_splits(self._cache)[split]
        return images.clone(), labels.clone()

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # In one thread: PIL holds the GIL for most of a small image's time, and two threads took twice as long.
        files = self._files[split]
        _, height, width = self.shape
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, (path, _) in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            image = read_image(path)
            if image.size != (width, height):
                size = f"{image.width}x{image.height}, {self._first} is {width}x{height}"
                raise UserError(f"{path} is {size}: resize all images to one size")
            if self._mode == "L" and image.mode not in GREY:
                raise UserError(f"{path} is in colour, {self._first} is greyscale: save the latter as RGB")
            images[i] = pil_to_tensor(image.convert(self._mode))
        return images, torch.tensor([label for _, label in files])


def read_image(path: str) -> Image.Image:
    """Return a decoded image; raise UserError, naming the file, if that fails or it has more than 8 bits a channel."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.load()
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError and others, depending on what is broken
        raise UserError(f"{path} is not a readable image ({error!r}): replace or remove it") from error
    if image.mode.startswith(("I", "F")):  # PIL would clip values above 255
        raise UserError(f"{path} has more than 8 bits per channel: save it with 8")
    return image


class Published(NamedTuple):
    """A published data set: its class in torchvision, which knows the checksums of its archives."""

    dataset: type[datasets.VisionDataset]
    classes: list[str]
    archives: list[Remote]


CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION_MNIST = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
)
PUBLISHED = {
    "mnist": Published(
        datasets.MNIST,
        [*map(str, range(10))],
        [Remote(f"{MNIST}/{name}", md5) for name, md5 in datasets.MNIST.resources],
    ),
    "fashion_mnist": Published(
        datasets.FashionMNIST,
        datasets.FashionMNIST.classes,
        [Remote(f"{FASHION_MNIST}/data/fashion/{name}", md5) for name, md5 in datasets.FashionMNIST.resources],
    ),
    "cifar10": Published(datasets.CIFAR10, CIFAR10_CLASSES, [Remote(datasets.CIFAR10.url, datasets.CIFAR10.tgz_md5)]),
    "cifar100": Published(
        datasets.CIFAR100, [*map(str, range(100))], [Remote(datasets.CIFAR100.url, datasets.CIFAR100.tgz_md5)]
    ),
}


class TorchvisionSource:
    """A published data set where torchvision keeps it under `data_dir`, downloaded if it is not there."""

    def __init__(self, name: str, data_dir: Path) -> None:
        self.name = self.fingerprint = name
        self.data_dir, self._published = data_dir, PUBLISHED[name]
        self.classes = self._published.classes
        is_mnist = issubclass(self._published.dataset, datasets.MNIST)
        self.shape = (1, 28, 28) if is_mnist else (3, 32, 32)
        self._folder = data_dir / self._published.dataset.__name__ / "raw" if is_mnist else data_dir

    def prepare(self) -> None:
        """Download and unpack what is missing or broken; safe in several processes at once."""
        folder, images = self._folder, self.data_dir / self.name
        names = ", ".join(archive.name for archive in self._published.archives)
        own = f"images into {images}/train/<class>/ and {images}/test/<class>/"
        remedy = f"put {names} there afresh, or {own}, or {ELSEWHERE}"
        with network(f"{self.name} is missing or broken in {folder}", remedy):
            once(self.data_dir, self._is_whole, self._fetch)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test", after `prepare`."""
        data = self._published.dataset(self.data_dir, train=split == "train")
        images, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
        return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2), labels  # MNIST: (N, H, W)

    def _fetch(self) -> None:
        for archive in self._published.archives:
            fetch(archive, self._folder / archive.name)
            extract_archive(os.fspath(self._folder / archive.name))

    def _is_whole(self) -> bool:
        try:
            return all(len(self.load(split)[1]) for split in SPLITS)
        except Exception:  # torchvision raises exceptions of many types for files that are missing or broken
            return False


ImageSource = FolderSource | TorchvisionSource
"""A source of images. Before `prepare` it has `name`, `fingerprint` (of the content), `classes` and `shape`."""
