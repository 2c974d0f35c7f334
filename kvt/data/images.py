"""Read data sets for image classification as uint8 tensors, from folders, Hugging Face or torchvision."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from kvt.data.files import ELSEWHERE, available, once, state_of
from kvt.data.hub import base_name, is_hub, list_images
from kvt.data.tensor_files import SPLITS, Splits, cache_splits, fingerprint, read_splits
from kvt.system import UserError, require_choice, require_positive

# the formats that PIL may read: PIL detects formats by content, and would start Ghostscript for PostScript files
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")


def list_folder(root: Path) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
    """Return the names of the classes, and a dict from each split to a list of pairs (path of an image, label).

    Images are in `root/train/<class>/`, and in test/<class>/, val/<class>/ or both. Raises UserError if train/ or both
    of the others are missing, if a split has no images, or if train/ lacks images of a class.
    """
    found = {}
    try:
        classes, numbers = find_classes(root / "train")
        for split in ("train", "test", "val"):
            if split == "train" or os.path.isdir(root / split):
                if others := {*find_classes(root / split)[0]} - {*classes}:
                    raise UserError(f"{root / split / min(others)} is not a class of train/: add or remove it")
                found[split] = make_dataset(root / split, numbers, IMG_EXTENSIONS, allow_empty=split != "train")
    except OSError as error:
        raise UserError(f"{root} needs images in train/<class>/ and test/<class>/: {error}") from error
    if len(found) < 2 or not all(found.values()):
        raise UserError(f"{root} needs images in test/<class>/ or val/<class>/: add some")
    return classes, found


def read_image(file: str | BytesIO, name: str) -> Image.Image:
    """Return the image in a file, grey ("L") or RGB; raise a UserError with `name` if it is unreadable."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return grey_or_rgb(image)
    except Exception as error:  # PIL raises errors of many types, depending on the damage
        raise UserError(f"{name} is not a readable image ({error!r}): replace or remove it") from error


def grey_or_rgb(image: Image.Image) -> Image.Image:
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    """Scale an image, without distortion, until it just covers width x height pixels; crop the centre to this size."""
    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


class DecodedImages:
    """Images from a folder (see `list_folder`) or a Hugging Face data set (see `list_images`), decoded once.

    The images are grey if all files are grey, otherwise RGB. With `image_size`, the shorter side is resized to
    `image_size` pixels, and the centre is cropped to a square; otherwise, all images must have the same size. The
    tensors are cached in `data_dir/.cache`. A new `image_size` or a changed file makes a new cache.
    """

    def __init__(self, root: Path, name: str, data_dir: Path, image_size: int | None = None) -> None:
        if image_size is not None:
            require_positive(image_size=image_size)
        self.root, self.name, self.image_size = root, name, image_size
        self._files: dict[str, list[tuple[str, int]]] = {}
        self._found: Mapping[str, Iterable[tuple[str | BytesIO, int]]]
        if is_hub(root):
            self.classes, self._found, files = list_images(str(root))
        else:
            self.root = Path(os.path.realpath(root))
            self.classes, self._files = list_folder(self.root)
            self._found, files = self._files, [path for pairs in self._files.values() for path, _ in pairs]
        self.splits = [*self._found]
        states = "\n".join([f"2 {image_size}", *(f"{path}\0{state_of(path)}" for path in files)])
        self.key = f"{name}-{hashlib.sha256(os.fsencode(states)).hexdigest()[:16]}"
        self._cache = data_dir / ".cache" / f"{self.key[-57:]}.pt"

    def prepare(self) -> None:
        """Decode all images into the cache unless it is complete. Several processes may call this method at once."""
        cache_splits(self._cache, self._decode, self._read)

    def files(self, split: str) -> list[str] | None:
        """Return the paths of a split's image files, relative to `root`; None for a data set of Hugging Face."""
        return [os.path.relpath(path, self.root) for path, _ in self._files.get(split, ())] or None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._splits["train"][0].shape[1:])

    @cached_property
    def content(self) -> str:
        """A hash of the images and labels."""
        return fingerprint(self._splits)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of a split."""
        images, labels = self._splits[split]
        return images.clone(), labels.clone()

    @cached_property
    def _splits(self) -> Splits:  # memory-mapped
        self.prepare()
        return self._read(self._cache)

    def _read(self, path: Path) -> Splits:
        return read_splits(path, self.splits)

    def _decode(self) -> Splits:
        images: dict[str, list[Tensor]] = {split: [] for split in self.splits}
        labels: dict[str, list[int]] = {split: [] for split in self.splits}
        first = None
        for split, pairs in self._found.items():
            for file, label in tqdm(pairs, desc=f"decoding {self.name}/{split}", disable=None):
                name = file if isinstance(file, str) else f"{self.root} {split}[{len(labels[split])}]"
                image = read_image(file, name)
                if self.image_size is not None:
                    image = fitted(image, self.image_size, self.image_size)
                first = first or (name, image.size)
                if image.size != first[1]:
                    sizes = f"{name} has (width, height) {image.size}, {first[0]} has {first[1]}"
                    raise UserError(f"{sizes}: resize all images to one size, or set --image_size")
                images[split].append(pil_to_tensor(image))
                labels[split].append(label)
        channels = max(len(image) for of_split in images.values() for image in of_split)
        stacked = {split: [image.expand(channels, -1, -1) for image in found] for split, found in images.items()}
        return {split: (torch.stack(found), torch.tensor(labels[split])) for split, found in stacked.items()}


@dataclass(frozen=True)
class ImageSet:
    """Description of a data set of images, as in `SETS`.

    Args:
        shape: shape of an image, (C, H, W).
        classes: names of the classes.
        read: function read(data_dir, split, download) that returns images, uint8 (N, C, H, W), and labels, int64 (N,),
            of the split "train" or "test". With `download`, `read` downloads missing files.
        mean, std: mean and standard deviation of pixels scaled to [0, 1]; each is a list of one number for all
            channels, or of one number for each channel.
    """

    shape: tuple[int, int, int]
    classes: Sequence[str]
    read: Callable[[Path, str, bool], tuple[Tensor, Tensor]]
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.25,)


def torchvision(dataset: Callable[..., Any]) -> Callable[[Path, str, bool], tuple[Tensor, Tensor]]:
    """Return the argument `read` of an `ImageSet` for a data set of torchvision, such as `datasets.MNIST`."""

    def read(data_dir: Path, split: str, download: bool) -> tuple[Tensor, Tensor]:
        data = dataset(data_dir, train=split == "train", download=download)
        images, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
        return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2), labels  # MNIST: (N, H, W)

    return read


# FashionMNIST is normalised with the mean and std of MNIST, and CIFAR-100 with those of CIFAR-10
DIGITS: dict[str, Any] = {"shape": (1, 28, 28), "mean": [0.1307], "std": [0.3081]}
PHOTOS: dict[str, Any] = {"shape": (3, 32, 32), "mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
OBJECTS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SETS: dict[str, ImageSet] = {
    "mnist": ImageSet(**DIGITS, classes=[*map(str, range(10))], read=torchvision(datasets.MNIST)),
    "fashion_mnist": ImageSet(**DIGITS, classes=datasets.FashionMNIST.classes, read=torchvision(datasets.FashionMNIST)),
    "cifar10": ImageSet(**PHOTOS, classes=OBJECTS, read=torchvision(datasets.CIFAR10)),
    "cifar100": ImageSet(**PHOTOS, classes=[*map(str, range(100))], read=torchvision(datasets.CIFAR100)),
}


class KnownImages:
    """The images of an `ImageSet`, read from `data_dir`."""

    def __init__(self, name: str, known: ImageSet, data_dir: Path) -> None:
        self.name = self.key = self.content = name
        self.splits, self.shape, self.classes = [*SPLITS], known.shape, [*known.classes]
        self.data_dir, self._set = data_dir, known

    def files(self, split: str) -> None:
        """Return None, because a file contains more than one image."""

    def prepare(self) -> None:
        """Download missing files. Several processes may call this method at once."""
        once(self.data_dir, self._is_there, lambda: self.load("test", download=True))

    def load(self, split: str, download: bool = False) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test"; call `prepare` first."""
        own = f"name a folder with train/<class>/ and test/<class>/ by --root, or put it at {self.data_dir / self.name}"
        with available(f"{self.name} in {self.data_dir}", f"{own}, or {ELSEWHERE}"):
            return self._set.read(self.data_dir, split, download)

    def _is_there(self) -> bool:
        with suppress(UserError):
            return bool(len(self.load("test")[1]))
        return False


ImageSource = DecodedImages | KnownImages
"""A source of images. `key` determines the names of caches. `content`, a hash or a name, identifies the images."""


def open_images(
    dataset: str,
    data_dir: Path,
    root: Path | None = None,
    image_size: int | None = None,
    sets: Mapping[str, ImageSet] = SETS,
) -> ImageSource:
    """Return the images in `root`. Without `root`, return those of `dataset`, a name in `sets`.

    If `data_dir/dataset/train` is a folder, the images in `data_dir/dataset` replace `sets[dataset]`. Raises UserError
    if `root` is None and `sets` has no `dataset`, or if `image_size` is given for `sets[dataset]`.
    """
    if root is not None:
        name = base_name(str(root)) if is_hub(root) else os.path.basename(os.path.realpath(root))
        return DecodedImages(root, name, data_dir, image_size)
    require_choice("data set", dataset, sets)
    if os.path.isdir(data_dir / dataset / "train"):
        return DecodedImages(data_dir / dataset, dataset, data_dir, image_size)
    if image_size is not None:
        raise UserError(f"image_size={image_size} needs a folder of images: give one with --root, or drop the flag")
    return KnownImages(dataset, sets[dataset], data_dir)
