"""Find the image files of a folder, and decode image files with PIL."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from kvt.data.tensor_files import splits_among
from kvt.data.texts import nfc
from kvt.system.errors import UserError
from kvt.system.files import is_hidden, list_files

GREY = ("1", "L", "LA", "La", "I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # PIL's modes of grey images
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""The only formats that kvt reads. PIL detects formats by content, and would start Ghostscript for PostScript files."""
EXTENSIONS = tuple(end for end, kind in Image.registered_extensions().items() if kind in FORMATS and end != ".pfm")

Content = Callable[[], bytes] | None
"""A function that returns the bytes of an encoded image, or None if the image is a file."""


class ImageFile(NamedTuple):
    """An encoded image."""

    name: str  # path of the file, or, if `content` is given, a name for messages
    label: int  # number of the class, or −1 if the images have no classes
    content: Content = None


class Listing(NamedTuple):
    """Encoded images of "train", and of "test" or "val" or both, or of "predict" if images have no classes."""

    root: str  # folder of the images, or name of the data set in messages
    classes: list[str]
    splits: dict[str, list[ImageFile]]
    files: list[str]  # files that contain the images; the key of the cache depends on their sizes and times
    left_out: str | None = None  # description of the files and folders of `root` that are in no split


def list_folder(root: Path) -> Listing:
    """List the images of a folder by split and class; `DecodedSource` documents the structure of the folder."""
    root = Path(os.path.realpath(root))
    if not os.path.isdir(root):
        raise UserError(f"{root}: no such folder")
    files = list_files(root)
    images = [path for path in files if path.suffix.lower() in EXTENSIONS]
    folders, others = split_folders(root)
    if "train" not in folders:
        if not images:
            raise UserError(f"{root} has no images ({', '.join(EXTENSIONS)}) and no train/<class>/: add images")
        paths = sorted(map(str, images))
        return Listing(
            str(root),
            [],
            {"predict": [ImageFile(path, -1) for path in paths]},
            paths,
            left_out=_others(files, paths, root),
        )
    names = [
        split for split in ("train", "test", "val") if split in folders or (split == "test" and "val" not in folders)
    ]
    folders = {split: folders.get(split, split) for split in names}
    found: dict[str, dict[str, list[str]]] = {  # by folder and class
        folder: {name: [] for name in _classes(root / folder)} for folder in folders.values()
    }
    for path in images:
        folder, *below = path.relative_to(root).parts
        if folder in found and len(below) > 1:
            found[folder][nfc(below[0])].append(str(path))
    label = {name: number for number, name in enumerate(found[folders["train"]])}
    splits: dict[str, list[ImageFile]] = {}
    for split, folder in folders.items():
        for name, paths in found[folder].items():
            if name not in label:
                raise UserError(f"{root / folder / name} is not a class of {folders['train']}/: add or remove it")
            if not paths:
                raise UserError(f"{root / folder / name} contains no images: add some, or remove the folder")
        splits[split] = [ImageFile(path, label[name]) for name, paths in found[folder].items() for path in paths]
    used = [file.name for files in splits.values() for file in files]
    of_splits = [path for path in files if path.relative_to(root).parts[0] in found]
    return Listing(str(root), [*label], splits, used, left_out=_others(of_splits, used, root, others))


def split_folders(root: Path) -> tuple[dict[str, str], list[str]]:
    """Return a dict from splits to names of subfolders, and a list with the names of all other subfolders."""
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not is_hidden(entry.name))
    return splits_among(names, str(root))


def _others(files: list[Path], used: list[str], root: Path, folders: Collection[str] = ()) -> str | None:
    """Return a description of the folders and files that are in no split, or None if there are none."""
    unused = sorted({*map(str, files)} - {*used})
    found = [f"the folder {name}" for name in folders]
    if unused:
        found.append(
            f"{len(unused)} of {len(files)} files, which are not images in a class folder, such as {unused[0]}"
        )
    return ", ".join(found).replace(f"{root}/", "") or None


def _classes(folder: Path) -> list[str]:
    """Return the sorted names, in NFC, of the subfolders of a folder; raise UserError if there are no subfolders."""
    try:
        names = sorted(nfc(entry.name) for entry in os.scandir(folder) if entry.is_dir() and not is_hidden(entry.name))
    except OSError as error:
        raise UserError(f"{folder.parent} needs train/<class>/ and test/<class>/: {error}") from error
    if not names:
        raise UserError(f"{folder} has no folder for a class: put images of each class into {folder}/<class>/")
    return names


def fitted(image: Image.Image, width: int, height: int) -> Image.Image:
    """Resize an image in proportion, to the least size that covers width x height; return the centre of this size."""
    return ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)


def to_tensor(image: Image.Image, channels: int) -> Tensor:
    """Return an image as a tensor, uint8 (C, H, W): grey if `channels` is 1, RGB if `channels` is 3."""
    return pil_to_tensor(image.convert("L" if channels == 1 else "RGB"))


def mode_of(file: ImageFile) -> str:
    """Return the mode that PIL reads in the header of an image; raise UserError with its name if it is damaged."""
    with _opened(file.name, file.content) as image:
        return image.mode


def read_image(path: str, size: int | None = None, content: Content = None) -> Image.Image:
    """Decode an image to 8 bits per channel, grey ("L") or RGB.

    The function rotates the image by its EXIF data, and blends transparent pixels with white.

    Args:
        path: path of the file, or, if `content` is given, a name for messages.
        size: number of pixels to which the caller will resize the shorter side. A much larger JPEG may be decoded at a
            reduced size, which is faster.
        content: function that returns the bytes of the image, if the image is not a file.

    Raises:
        UserError: the image is damaged, is larger than PIL allows, or has more than 16 bits per channel.
    """
    with _opened(path, content) as file:
        if size is not None:
            file.draft(None, (2 * size, 2 * size))  # decode a JPEG at a reduced size, at least 2 · size
        image: Image.Image = _whole_range(file, ImageOps.exif_transpose(file))
    return in_grey_or_rgb(image, path)


def _whole_range(file: Image.Image, image: Image.Image) -> Image.Image:
    """Rescale an image with more than 8 bits per channel to levels from 0 (black) to 65535 (white)."""
    if file.format == "PPM" and image.mode == "I":  # PIL has scaled the levels to 16 bits
        return image.convert("I;16")
    if file.format == "TIFF" and image.mode.startswith("I;16"):
        tags: Mapping[int, Any] = file.tag_v2  # type: ignore[attr-defined]
        bits = tags.get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
        levels = np.asarray(image).astype(np.uint16) << (16 - bits)
        is_negative = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0  # level 0 is white
        return Image.fromarray((1 << 16) - (1 << (16 - bits)) - levels if is_negative else levels)
    return image


def in_grey_or_rgb(image: Image.Image, name: str) -> Image.Image:
    """Convert an image of any mode to grey ("L") or RGB, and blend transparent pixels with white.

    Of 16 bits per channel, the upper 8 bits are kept. If the image has more than 16 bits per channel, the function
    raises UserError with `name`.
    """
    is_grey = image.mode in GREY
    if image.mode.startswith("I;16"):
        levels = np.asarray(image).astype(np.uint16)
        is_hidden_level = levels == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(is_hidden_level, 255, levels >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):  # PIL would clip values above 255
        raise UserError(f"{name} has more than 16 bits per channel: save it with 8 bits")
    hidden = image.info.get("transparency")
    if isinstance(hidden, tuple) and max(hidden) > 255:  # PIL does not reduce this colour to 8 bits
        image = image.copy()
        image.info["transparency"] = tuple(level >> 8 for level in hidden)
    if image.has_transparency_data:  # the colours of transparent pixels are arbitrary
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("L" if is_grey else "RGB")


@contextmanager
def _opened(path: str, content: Content) -> Iterator[Image.Image]:
    try:
        with Image.open(BytesIO(content()) if content else path, formats=FORMATS) as image:
            yield image
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except Image.DecompressionBombError as error:
        pixels = str(error).partition(",")[0]  # "Image size (196000000 pixels) exceeds limit of 178956970 pixels"
        raise UserError(f"{path} is too large: {pixels}: save it with fewer pixels") from error
    except Exception as error:  # PIL raises errors of many types, depending on the damage
        raise UserError(f"{path} is not a readable image ({error!r}): replace or remove it") from error
