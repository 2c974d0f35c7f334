"""A folder of images as whole uint8 tensors."""

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from kvt.data.image_source import ImageSource
from kvt.data.tensor_cache import if_cached, make_once
from kvt.data.tensor_files import Splits, read_splits
from kvt.system.errors import UserError
from kvt.system.files import require_file
from kvt.system.memory import require_memory

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""The formats of IMG_EXTENSIONS. PIL guesses from the content and would start Ghostscript for a PostScript file."""

logging.getLogger("PIL").addHandler(logging.NullHandler())  # its messages are in its exceptions too


class FolderSource(ImageSource):
    """Images in `root/{train,test}/<class>/`, all of one size, in the order of torchvision's ImageFolder.

    One channel if the first training image is greyscale, else RGB. Of a file with several frames the first is taken;
    EXIF orientation is ignored. The decoded tensors are cached in `data_dir/.cache` under a hash of every file's path,
    size and modification time. Raises UserError, naming the path, for folders and images that are missing or
    unsuitable; all images but the first are opened by `prepare` only.
    """

    def __init__(self, root: Path, data_dir: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.data_dir = data_dir
        self.name = self.root.name
        _require_folder(self.root, "name a folder of train/ and test/, each with one folder per class")

        self.classes = _class_folders(self.root / "train")
        label = {name: i for i, name in enumerate(self.classes)}
        test_classes = _class_folders(self.root / "test")
        if strangers := [name for name in test_classes if name not in label]:
            raise UserError(
                f"{self.root / 'test' / strangers[0]} is no class of {self.root / 'train'}: add or remove it"
            )
        self._files = {
            "train": _list_images(self.root / "train", label),
            "test": _list_images(self.root / "test", {name: label[name] for name in test_classes}),
        }

        self._content = self._hash()
        self.fingerprint = f"{self.name}-{self._content}"
        self._cache = self.data_dir / ".cache" / f"{self.name:.40}-{self._content}.pt"
        self._first = self._files["train"][0][0]
        with _opened(self._first) as image:
            self._mode = "L" if _is_grey(image) else "RGB"
            self.shape = (len(self._mode), image.height, image.width)
            image.load()  # a broken file fails here, before a model is made for its size
        count = sum(map(len, self._files.values()))
        require_memory(2 * count * prod(self.shape), f"{self.root}: {count} images of {image.width}x{image.height}")

    def prepare(self) -> None:
        """Decode all images into the cache unless they are there; see `ImageSource.prepare`."""
        make_once(self._cache, self.data_dir, lambda: {split: self._decode(split) for split in self._files}, self._read)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        if (cached := if_cached(self._read)) is None:  # within `read_only`
            return self._decode(split)
        images, labels = cached[split]
        return images.clone(), labels.clone()

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for files in self._files.values():
            for path, _ in files:
                stat = require_file(path, "replace or remove it")
                digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def _read(self) -> Splits:
        splits = read_splits(self._cache)
        for split, files in self._files.items():
            images, labels = splits[split]
            if images.shape != (len(files), *self.shape) or len(labels) != len(files):
                raise UserError(f"{self._cache} holds other images than {self.root}: remove it")
        return splits

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # In one thread: PIL holds the GIL for most of a small image's time, and two threads took twice as long.
        files = self._files[split]
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, (path, _) in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            images[i] = self._read_image(path)
        if self._hash() != self._content:
            raise UserError(f"{self.root} changed while it was read: start again when nothing writes there any more")
        return images, torch.tensor([label for _, label in files])

    def _read_image(self, path: str) -> Tensor:
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


def _require_folder(path: Path, remedy: str) -> None:
    if not os.path.isdir(path):
        raise UserError(f"{path} is {'a file, not a folder' if os.path.exists(path) else 'missing'}: {remedy}")


def _class_folders(folder: Path) -> list[str]:
    remedy = "put one folder of images per class there"
    _require_folder(folder, remedy)
    try:
        classes = sorted(
            entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): make it readable or remove it") from error
    if not classes:
        raise UserError(f"{folder} has no class folders: {remedy}")
    return classes


def _list_images(folder: Path, label: dict[str, int]) -> list[tuple[str, int]]:
    """(path, label) of the images of each class and its subfolders, in order of path."""
    files = make_dataset(os.fspath(folder), label, extensions=IMG_EXTENSIONS, allow_empty=True)
    found = {number for _, number in files}
    for name, number in label.items():
        if number not in found:
            formats = " ".join(IMG_EXTENSIONS)
            raise UserError(f"{folder / name} has no image: put some there ({formats}) or remove it")
    return files


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA")


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, which do not change a pixel
            with Image.open(path, formats=FORMATS) as image:
                if image.mode.startswith(("I", "F")):  # PIL would clip values above 255
                    raise UserError(f"{path} has more than 8 bits a pixel and channel: save it with 8")
                yield image
    except UserError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError and others, depending on what is broken
        reason = str(error) or type(error).__name__
        raise UserError(f"{path} is no readable image ({reason}): replace or remove it") from error
