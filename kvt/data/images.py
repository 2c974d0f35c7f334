"""Image classification data sets as whole uint8 tensors: folders of images, sets of Hugging Face and of torchvision."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import extract_archive
from tqdm import tqdm

from kvt.data.download import Remote, fetch, network
from kvt.data.hub import is_hub, list_images
from kvt.data.image_files import GREY, ImageFile, Listing, fitted, list_folder, mode_of, read_image, to_tensor
from kvt.data.tensor_files import ELSEWHERE, SPLITS, Splits, cache_splits, fingerprint, once, read_splits
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import require_file, state_of


def open_images(
    dataset: str, data_dir: Path, root: Path | None = None, image_size: int | None = None
) -> "DecodedSource | TorchvisionSource":
    """Return the images of `root`, else the folder `data_dir/dataset` if there is one, else torchvision's `dataset`."""
    if root is not None:
        found = list_images(str(root)) if is_hub(root) else list_folder(root)
        return DecodedSource(found, data_dir, image_size)
    if dataset not in PUBLISHED:
        raise unknown("data set", dataset, PUBLISHED)
    folder = data_dir / dataset
    if os.path.isdir(folder / "train"):
        return DecodedSource(list_folder(folder), data_dir, image_size)
    if image_size is not None:
        raise UserError(f"image_size={image_size} is for a folder of images: name one with --root, or drop the flag")
    return TorchvisionSource(dataset, data_dir)


class DecodedSource:
    """Images of any format and size, decoded once: those of a folder, or of a data set of Hugging Face.

    A folder has them in `root/{train,test}/<class>/`, and in `root/val/<class>/` if that is there, in ImageFolder's
    order; see `list_images` for a data set. They are grey if all of them are, else RGB, and upright, as their EXIF data
    say. What is transparent is over white. Of a file with several frames the first is taken, of 16 bits a grey level
    the upper 8. With `image_size`, the shorter side of each is resized to so many pixels and the centre cropped to a
    square; without, all must be of one size. The decoded tensors are cached in `data_dir/.cache` under a hash of every
    file's path, size and times. As long as the first image is coloured, `prepare` only opens the others.

    A root that has images but no train/ is one split, "predict", without classes; its labels are −1. It is not cached.
    """

    def __init__(self, found: Listing, data_dir: Path, image_size: int | None = None) -> None:
        if image_size is not None:
            require_positive(image_size=image_size)
        self.root, self.classes, self._files, files = found
        self.image_size, self.name, self.has_classes = image_size, os.path.basename(self.root), bool(self.classes)
        digest = hashlib.sha256(f"upright, over white {image_size}".encode())
        for path in files:
            require_file(path, "replace or remove it")
            digest.update(os.fsencode(path) + f"\0{state_of(path)}\n".encode())
        key = digest.hexdigest()[:16]
        self.key = f"{self.name}-{key}"
        self._cache = data_dir / ".cache" / f"{self.name:.40}-{key}.pt"
        self._first = next(self._all())
        image = self._read(self._first)
        self.shape = (self._channels(), image.height, image.width)

    def prepare(self) -> None:
        """Decode all images into the cache unless they are there; safe in several processes at once."""
        if self.has_classes:
            cache_splits(self._cache, lambda: {split: self._decode(split) for split in self._files}, self._read_cache)

    @property
    def splits(self) -> list[str]:
        return [*self._files]

    def files(self, split: str) -> list[str] | None:
        """Return the files of a split, relative to the root, in the order of its images; None if they are in none."""
        return [
            os.path.relpath(file.name, self.root) for file in self._files.get(split, ()) if not file.content
        ] or None

    @cached_property
    def content(self) -> str:
        return fingerprint(self._splits)

    @cached_property
    def _splits(self) -> Splits:  # memory-mapped
        if not self.has_classes:
            return {split: self._decode(split) for split in self._files}
        self.prepare()
        return self._read_cache(self._cache)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 (N, C, H, W), and labels, int64 (N,), of a split, after `prepare`."""
        images, labels = self._splits[split]
        return images.clone(), labels.clone()

    def _all(self) -> Iterator[ImageFile]:
        return chain.from_iterable(self._files.values())

    def _read_cache(self, path: Path) -> Splits:
        return read_splits(path, self._files)

    def _channels(self) -> int:
        with suppress(UserError):  # of what has been decoded, no file need be opened
            return self._read_cache(self._cache)["train"][0].shape[1]
        return 1 if all(mode_of(file) in GREY for file in self._all()) else 3

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # In one thread: PIL holds the GIL for most of a small image's time, and two threads took twice as long.
        files = self._files[split]
        channels, height, width = self.shape
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, file in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            image = self._read(file)
            if image.size != (width, height):
                like = f", {self._first.name}" if self.has_classes else ", the model's images"
                sizes = f"{file.name} is {image.width}x{image.height} pixels{like} {width}x{height}"
                raise UserError(f"{sizes}: resize all images to one size, or have them resized with --image_size")
            images[i] = to_tensor(image, channels)
        return images, torch.tensor([file.label for file in files])

    def _read(self, file: ImageFile) -> Image.Image:
        image, size = read_image(file.name, self.image_size, file.content), self.image_size
        return image if size is None else fitted(image, size, size)


class Published(NamedTuple):
    """A published data set: its class and archives, by name the SHA-256 of each."""

    dataset: type[datasets.VisionDataset]
    classes: list[str]
    url: str
    archives: dict[str, str]


CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"
ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
PUBLISHED = {
    "mnist": Published(
        datasets.MNIST,
        [*map(str, range(10))],
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": Published(
        datasets.FashionMNIST,
        datasets.FashionMNIST.classes,
        f"{ZALANDO}/data/fashion",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "cifar10": Published(
        datasets.CIFAR10,
        CIFAR10_CLASSES,
        CIFAR_URL,
        {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    ),
    "cifar100": Published(
        datasets.CIFAR100,
        [*map(str, range(100))],
        CIFAR_URL,
        {"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
    ),
}


class TorchvisionSource:
    """A published data set where torchvision keeps it under `data_dir`, downloaded if it is not there."""

    def __init__(self, name: str, data_dir: Path) -> None:
        self.name = self.key = self.content = name
        self.splits, self.has_classes = [*SPLITS], True
        self.data_dir, self._published = data_dir, PUBLISHED[name]
        self.classes = self._published.classes
        is_mnist = issubclass(self._published.dataset, datasets.MNIST)
        self.shape = (1, 28, 28) if is_mnist else (3, 32, 32)
        self._folder = data_dir / self._published.dataset.__name__ / "raw" if is_mnist else data_dir

    def files(self, split: str) -> None:
        """Return None: the images are in no files of their own."""

    def prepare(self) -> None:
        """Download and unpack what is missing or broken; safe in several processes at once."""
        folder, images = self._folder, self.data_dir / self.name
        names = ", ".join(self._published.archives)
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
        for name, sha256 in self._published.archives.items():
            fetch(Remote(f"{self._published.url}/{name}", sha256), self._folder / name)
            extract_archive(os.fspath(self._folder / name))

    def _is_whole(self) -> bool:
        try:
            return all(len(self.load(split)[1]) for split in SPLITS)
        except Exception:  # torchvision raises exceptions of many types for files that are missing or broken
            return False


ImageSource = DecodedSource | TorchvisionSource
"""A source of images.

It has `name`, `classes`, `shape`, `splits` and their `files`, a `key` of what is computed from the images here, and
their `content`, a hash that does not depend on where they lie.
"""
