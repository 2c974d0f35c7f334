"""Read data sets for image classification as uint8 tensors, from folders, Hugging Face or torchvision."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.utils import extract_archive
from tqdm import tqdm

from kvt.data.download import Remote, fetch, network
from kvt.data.hub import is_hub, list_images
from kvt.data.image_files import (
    GREY,
    ImageFile,
    Listing,
    fitted,
    list_folder,
    mode_of,
    read_image,
    split_folders,
    to_tensor,
)
from kvt.data.tensor_files import ELSEWHERE, SPLITS, Splits, cache_splits, fingerprint, once, read_splits
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import require_file, sha256_of, state_of


def open_images(
    dataset: str,
    data_dir: Path,
    root: Path | None = None,
    image_size: int | None = None,
    sets: "Mapping[str, ImageSet] | None" = None,
) -> "DecodedSource | KnownSource":
    """Return the source of images: `root` if given, else the folder `data_dir/dataset` if it exists, else a known set.

    The known set is `sets[dataset]`, where `sets` is `SETS` by default.
    """
    sets = SETS if sets is None else sets
    if root is not None:
        found = list_images(str(root)) if is_hub(root) else list_folder(root)
        return DecodedSource(found, data_dir, image_size)
    if dataset not in sets:
        raise unknown("data set", dataset, sets)
    folder = data_dir / dataset
    if os.path.isdir(folder) and "train" in split_folders(folder)[0]:
        source = DecodedSource(list_folder(folder), data_dir, image_size)
        source.name = dataset  # `folder` may be a link to a folder with another name
        return source
    if image_size is not None:
        raise UserError(f"image_size={image_size} needs a folder of images: give one with --root, or drop the flag")
    return KnownSource(dataset, sets[dataset], data_dir)


class DecodedSource:
    """Images of any format and size from a folder or a Hugging Face data set, decoded once and cached.

    A folder has images in `root/train/<class>/`, and in `root/test/<class>/` or `root/val/<class>/` or both.
    `SPLIT_NAMES` lists other accepted names of the folders train, test and val. Images have the order of torchvision's
    ImageFolder. `list_images` describes how images of a Hugging Face data set are found.

    The decoded images are grey if all files are grey, otherwise RGB. Images are rotated by their EXIF data. Transparent
    pixels are blended with white. Only the first frame of a file is read. Of a level with 16 bits, the upper 8 bits are
    kept. With `image_size`, the shorter side is resized to `image_size` pixels, and the centre is cropped to a square.
    Without `image_size`, all images must have equal sizes. The decoded tensors are cached in `data_dir/.cache`. The
    name of the cache file contains a hash of the paths, sizes and times of all image files.

    A folder with images but without train/ has one split, "predict". Its images have no classes, so all labels are −1.
    Its decoded tensors are not cached.
    """

    def __init__(self, found: Listing, data_dir: Path, image_size: int | None = None) -> None:
        if image_size is not None:
            require_positive(image_size=image_size)
        self.root, self.classes, self._files, files, self.left_out = found
        self.image_size, self.name, self.has_classes = image_size, os.path.basename(self.root), bool(self.classes)
        digest = hashlib.sha256(f"upright, over white, 16 bits {image_size} ".encode())
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
        """Decode all images into the cache unless it is complete; several processes may call `prepare` at once."""
        if self.has_classes:
            cache_splits(self._cache, lambda: {split: self._decode(split) for split in self._files}, self._read_cache)

    @property
    def splits(self) -> list[str]:
        return [*self._files]

    def files(self, split: str) -> list[str] | None:
        """Return the paths of the files of a split, relative to the root, in the order of the images of the split.

        The result is None if a file contains more than one image, as in a Hugging Face data set.
        """
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
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of a split; call `prepare` first."""
        images, labels = self._splits[split]
        return images.clone(), labels.clone()

    def _all(self) -> Iterator[ImageFile]:
        return chain.from_iterable(self._files.values())

    def _read_cache(self, path: Path) -> Splits:
        return read_splits(path, self._files)

    def _channels(self) -> int:
        with suppress(UserError):  # if the cache is readable, there is no need to open image files
            return self._read_cache(self._cache)["train"][0].shape[1]
        return 1 if all(mode_of(file) in GREY for file in self._all()) else 3

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # in one thread, because PIL holds the GIL for most of the time: two threads took twice as long
        files = self._files[split]
        channels, height, width = self.shape
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, file in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            image = self._read(file)
            if image.size != (width, height):
                like = f", {self._first.name}" if self.has_classes else ", the model's images"
                sizes = f"{file.name} is {image.width}x{image.height} pixels{like} {width}x{height}"
                raise UserError(f"{sizes}: resize all images to one size, or set --image_size")
            images[i] = to_tensor(image, channels)
        return images, torch.tensor([file.label for file in files])

    def _read(self, file: ImageFile) -> Image.Image:
        image, size = read_image(file.name, self.image_size, file.content), self.image_size
        return image if size is None else fitted(image, size, size)


@dataclass(frozen=True)
class ImageSet:
    """Description of a data set of images, an entry of `SETS`.

    Args:
        shape: shape of an image, (C, H, W).
        classes: names of the classes.
        read: function of two arguments, data_dir and "train" or "test", that returns images, uint8 (N, C, H, W), and
            labels, int64 (N,).
        files: dict that maps the names of the files of the data set to their SHA-256.
        folder: folder of the files, relative to data_dir.
        url: address of the folder from which kvt downloads the files; "" means that the user provides the files.
        mean: mean of the pixels, from 0 to 1, for normalisation: one number, or one number for each channel.
        std: standard deviation of the pixels, for normalisation: one number, or one number for each channel.
    """

    shape: tuple[int, int, int]
    classes: Sequence[str]
    read: Callable[[Path, str], tuple[Tensor, Tensor]]
    files: Mapping[str, str]
    folder: str = ""
    url: str = ""
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.25,)


def torchvision(dataset: Callable[..., Any]) -> Callable[[Path, str], tuple[Tensor, Tensor]]:
    """Return a function that reads a data set of torchvision, for the field `read` of an `ImageSet`."""

    def read(data_dir: Path, split: str) -> tuple[Tensor, Tensor]:
        data = dataset(data_dir, train=split == "train")
        images, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
        return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2), labels  # MNIST: (N, H, W)

    return read


ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141"
DIGITS: dict[str, Any] = {"shape": (1, 28, 28), "mean": [0.1307], "std": [0.3081]}  # mean and std of MNIST
PHOTOS: dict[str, Any] = {"shape": (3, 32, 32), "url": "https://www.cs.toronto.edu/~kriz"}
PHOTOS |= {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}  # of CIFAR-10
SETS: dict[str, ImageSet] = {
    "mnist": ImageSet(
        **DIGITS,
        classes=[*map(str, range(10))],
        read=torchvision(datasets.MNIST),
        folder="MNIST/raw",
        url="https://ossci-datasets.s3.amazonaws.com/mnist",
        files={
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": ImageSet(
        **DIGITS,
        classes=datasets.FashionMNIST.classes,
        read=torchvision(datasets.FashionMNIST),
        folder="FashionMNIST/raw",
        url=f"{ZALANDO}/data/fashion",
        files={
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "cifar10": ImageSet(
        **PHOTOS,
        classes=["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
        read=torchvision(datasets.CIFAR10),
        files={"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
    ),
    "cifar100": ImageSet(
        **PHOTOS,
        classes=[*map(str, range(100))],
        read=torchvision(datasets.CIFAR100),
        files={"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
    ),
}


class KnownSource:
    """The images of an `ImageSet`, which are read from `data_dir`. Missing files are downloaded."""

    def __init__(self, name: str, known: ImageSet, data_dir: Path) -> None:
        self.name = self.key = self.content = name
        self.splits, self.has_classes, self.left_out = [*SPLITS], True, None
        self.shape, self.classes = known.shape, [*known.classes]
        self.data_dir, self._set, self._folder = data_dir, known, data_dir / known.folder

    def files(self, split: str) -> None:
        """Return None, because a file contains more than one image."""

    def prepare(self) -> None:
        """Download and unpack files that are missing or broken; several processes may call `prepare` at once."""
        images = self.data_dir / self.name
        own = f"images into {images}/train/<class>/ and {images}/test/<class>/"
        remedy = f"put new copies of {', '.join(self._set.files)} there, or {own}, or {ELSEWHERE}"
        remedy += ", or name your own images with --root"
        with network(f"{self.name} is missing or broken in {self._folder}", remedy):
            once(self.data_dir, self._is_whole, self._fetch)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test"; call `prepare` first.

        Raises UserError unless there are as many labels as images, and each label is the number of a class.
        """
        images, labels = self._set.read(self.data_dir, split)
        name, count = f"{self.name} in {self._folder}: {split}", len(self.classes)
        if len(images) != len(labels):
            raise UserError(
                f"{name} has {len(images):,} images and {len(labels):,} labels: use files that belong together"
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() < count:
            are_what = f"{name} has labels from {labels.min()} to {labels.max()}, for classes from 0 to {count - 1}"
            raise UserError(f"{are_what}: use the files of {self.name}, or describe your files with an ImageSet")
        return images, labels

    def _fetch(self) -> None:
        if not self._set.url:
            raise OSError("the ImageSet has no url")
        with suppress(Exception):  # first unpack local files: they may differ from the published files only in packing
            self._unpack(name for name in self._set.files if Path(name).suffixes == [".gz"])  # a .gz holds one file
        if self._is_whole():
            return
        for name, sha256 in self._set.files.items():
            fetch(Remote(f"{self._set.url}/{name}", sha256), self._folder / name)
        self._unpack(name for name in self._set.files if name.endswith((".gz", ".zip", ".tar")))

    def _unpack(self, names: Iterable[str]) -> None:
        for name in names:
            extract_archive(os.fspath(self._folder / name))

    def _is_whole(self) -> bool:
        unpublished = {} if self._set.url else self._set.files
        try:
            same = all(sha256_of(self._folder / name) == sha256 for name, sha256 in unpublished.items())
            return same and all(len(self.load(split)[1]) for split in SPLITS)
        except UserError:
            raise
        except Exception:  # torchvision raises exceptions of many types for files that are missing or broken
            return False


ImageSource = DecodedSource | KnownSource
"""A source of images.

A source has the attributes `name`, `classes`, `shape` and `splits`, and the method `files`. The attribute `key` names
caches of tensors that are computed from the images. `content` is a hash of the images, independent of their location,
or the name of a known set. `left_out` describes files that are in no split.
"""
