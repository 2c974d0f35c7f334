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
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.functional import pil_to_tensor
from tqdm import tqdm

from kvt.data.image_source import ImageSource
from kvt.data.tensor_cache import if_kept, make_once
from kvt.data.tensor_files import Splits, read_splits
from kvt.system.errors import UserError
from kvt.system.files import require_file
from kvt.system.memory import require_memory

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
"""Those that the suffixes stand for. PIL knows more, whatever the suffix, and starts a program for some of them."""

logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it would say is in its exception too


class FolderSource(ImageSource):
    """Images in `root/{train,test}/<class>/`, all of one size, as torchvision's ImageFolder lists and decodes them.

    One channel if the first training image is greyscale, else RGB; of a file with several pictures the first, and no
    picture is turned as its EXIF data may ask. Links are followed, but each folder of a class counts once. The decoded
    tensors are kept in `data_dir/.cache` under the hash of every file's path, size and time, so a changed file is a new
    entry; that folder may be deleted at any time. Raises UserError, naming the path, for whatever is amiss with
    the folder; all images but the first are opened by `prepare` only.
    """

    def __init__(self, root: Path, data_dir: Path) -> None:
        self.root = Path(os.path.realpath(root))  # Path.resolve fails where links lead in circles
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

        self._content = self._hash()
        self.fingerprint = f"{self.name}-{self._content}"
        self._cache = self.data_dir / ".cache" / f"{self.name:.40}-{self._content}.pt"
        self._first = self._files["train"][0][0]
        with _opened(self._first) as image:
            self._mode = "L" if _is_grey(image) else "RGB"
            self.shape = (len(self._mode), image.height, image.width)
            image.load()  # or a broken file would claim any size, and a model be made for it
        count = sum(map(len, self._files.values()))
        require_memory(2 * count * prod(self.shape), f"{self.root}: {count} images of {image.width}x{image.height}")

    def prepare(self) -> None:
        """Decodes all images into the cache unless they are there; see `ImageSource.prepare`."""
        make_once(self._cache, self.data_dir, self._decode_all, self._kept)

    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """See `ImageSource.load`."""
        if (kept := if_kept(self._kept)) is None:  # as within `read_only`
            return self._decode(split)
        images, labels = kept[split]
        return images.clone(), labels.clone()

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for files in self._files.values():
            for path, _ in files:
                stat = require_file(path, "replace or remove it")
                digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def _kept(self) -> Splits:
        splits = read_splits(self._cache)
        for split, files in self._files.items():
            images, labels = splits[split]
            alike = images.shape == (len(files), *self.shape)
            alike &= (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
            if not alike or labels.tolist() != [label for _, label in files]:
                raise UserError(f"{self._cache} holds other images than {self.root}: remove it")
        return splits

    def _decode_all(self) -> Splits:
        return {split: self._decode(split) for split in self._files}

    def _decode(self, split: str) -> tuple[Tensor, Tensor]:
        # One thread: PIL holds Python's lock for most of a small image, and two threads were half as fast.
        files = self._files[split]
        images = torch.empty(len(files), *self.shape, dtype=torch.uint8)
        for i, (path, _) in enumerate(tqdm(files, desc=f"decoding {self.name}/{split}", disable=None)):
            images[i] = self._read(path)
        if self._hash() != self._content:
            raise UserError(f"{self.root} changed while it was read: start again when nothing writes there any more")
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


def _require_folder(path: Path, remedy: str) -> None:
    if not os.path.isdir(path):  # unlike Path.is_dir, no error where a folder on the way cannot be searched
        raise UserError(f"{path} is {'a file, not a folder' if os.path.exists(path) else 'missing'}: {remedy}")


def _class_folders(folder: Path) -> list[str]:
    remedy = "put one folder of images per class there"
    _require_folder(folder, remedy)
    with _readable(folder):
        names = sorted(os.listdir(folder))
    classes = [name for name in names if not name.startswith(".") and os.path.isdir(folder / name)]
    if not classes:
        raise UserError(f"{folder} has no class folders: {remedy}")
    return classes


def _list_images(folder: Path, label: dict[str, int]) -> list[tuple[str, int]]:
    """(path, label) of the images of each class, in order of path."""
    files = []
    for name, i in label.items():
        found = [path for path in _files_below(str(folder / name)) if path.lower().endswith(IMG_EXTENSIONS)]
        if not found:
            formats = " ".join(IMG_EXTENSIONS)
            raise UserError(f"{folder / name} has no image: put some there ({formats}) or remove it")
        files += [(path, i) for path in found]
    return files


def _files_below(folder: str) -> list[str]:
    """All files in a folder and its folders, each folder once: links that lead in circles would never end."""
    files: list[str] = []
    waiting, seen = [folder], set()
    while waiting:
        here = waiting.pop()
        with _readable(here):
            found, names = os.stat(here), os.listdir(here)
        if (found.st_dev, found.st_ino) in seen:
            continue
        seen.add((found.st_dev, found.st_ino))
        for path in (os.path.join(here, name) for name in sorted(names, reverse=True)):  # the first is the next
            (waiting if os.path.isdir(path) else files).append(path)
    return sorted(files, key=os.path.split)


@contextmanager
def _readable(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}): make it readable or remove it") from error


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA")


@contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, that do not change a pixel
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                if image.mode.startswith(("I", "F")):  # PIL would cut off whatever is above 255
                    raise UserError(f"{path} has more than 8 bits a pixel and channel: save it with 8")
                yield image
    except UserError:
        raise
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, ... according to what is broken
        reason = str(error) or type(error).__name__
        raise UserError(f"{path} is no readable image ({reason}): replace or remove it") from error
