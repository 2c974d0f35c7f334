"""Files of tensors, made by nobody knows whom: read whole and sound, or not at all."""

import warnings
from os import SEEK_END
from pathlib import Path
from struct import pack, unpack
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from kvt.data.pickles import require_terse, require_terse_pickles
from kvt.system.errors import UserError
from kvt.system.files import require_file
from kvt.system.memory import require_memory

Splits = dict[str, tuple[Tensor, Tensor]]
"""Images, or what stands for them, and labels of each split."""
ARCHIVE = b"PK\3\4"
"""What a file of `torch.save` begins with, unless a torch before 1.6 wrote it."""
OLD = 5
"""How many pickles that one wrote before the numbers."""
END = 98
"""Bytes behind an archive's directory, where it may be a large one."""
LAYOUT = '{"train": (features, labels), "test": (features, labels)}'


def read_splits(path: Path) -> Splits:
    """What `torch.save({"train": (tensor, tensor), "test": (tensor, tensor)}, path)` wrote, mapped into memory.

    Raises:
        UserError: the file is missing, damaged or not made like that, or has tensors without values of their own.
    """
    size = require_file(path, "name another file").st_size
    require_memory(4 * size, f"{path}: {size:,} bytes of tensors")
    try:
        read = load(path, mmap=True)
    except Exception as error:  # a broken pickle raises nearly anything
        raise UserError(f"{path} is no readable file of features: save it with torch.save, tensors only") from error
    if not isinstance(read, dict) or not {"train", "test"} <= read.keys():
        raise UserError(f"{path} is no file of features: save {LAYOUT}")
    splits: Splits = {}
    for split in ("train", "test"):
        pair = read[split]
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise UserError(f"{path}: {split!r} is no pair of tensors: save {LAYOUT}")
        if not all(has_values(part) for part in pair):
            raise UserError(f"{path}: {split!r} has tensors that are sparse, repeated or valueless: save dense ones")
        splits[split] = (pair[0], pair[1])
    return splits


def read_features(path: Path, width: int | None = None) -> Splits:
    """The features, as float32, and labels, as int64, in a file: see `kvt.data.features.FeatureFile`.

    Args:
        path: of the file.
        width: of the features; default: any.

    Raises:
        UserError: it is missing, unreadable, or not made like that; it is named.
    """
    splits: Splits = {}
    for split, (features, labels) in read_splits(path).items():
        if wrong := _amiss(features, labels):
            raise UserError(f"{path}: {split!r} {wrong}")
        try:
            splits[split] = (features.detach().to(torch.float32, copy=True), labels.to(torch.int64, copy=True))
        except NotImplementedError as error:  # of two numbers a byte
            raise UserError(f"{path}: {split!r} has features of {features.dtype}: save them as float32") from error
        if not splits[split][0].isfinite().all():
            raise UserError(f"{path}: {split!r} has features that are infinite or not a number: compute them anew")
    train, test = (splits[split][0].shape[1] for split in ("train", "test"))
    if width not in (None, train):
        raise UserError(f"{path}: features are {train} wide, not {width}: remove the file")
    if train != test:
        raise UserError(f"{path}: features of 'train' are {train} wide, of 'test' {test}: they must be alike")
    return splits


def load(path: Path, or_old: bool = False, mmap: bool = False) -> Any:
    """What `torch.save` wrote, plain data and tensors: no code in it is run.

    Args:
        path: of the file.
        or_old: whether it may be of a torch before 1.6, which wrote no checksums.
        mmap: whether tensors stay in the file until they are used.

    Raises:
        Exception: it is missing, damaged, or no such file; a broken pickle raises nearly anything.
    """
    _require_sound(path, or_old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of tensors that are to be refused
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def has_values(tensor: Tensor) -> bool:
    """Whether it is dense, and each of its numbers in the file: one that repeats them may claim any size."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _require_sound(path: Path, or_old: bool) -> None:
    """Makes sure that a file is as it was written, and says nothing over and over: torch compares no checksum."""
    with path.open("rb") as start:
        if start.read(len(ARCHIVE)) != ARCHIVE:  # torch would not look for an archive behind it
            if not or_old:
                raise ValueError("it is no archive")
            start.seek(0)
            require_terse_pickles(start, OLD)
            return
    with ZipFile(path) as file:
        _require_one_directory(path, file.start_dir)
        if sum(entry.file_size for entry in file.infolist()) > path.stat().st_size:
            raise ValueError("it claims to hold more than there is")
        if damaged := file.testzip():
            raise ValueError(f"{damaged} is damaged")
        for name in file.namelist():
            if name.endswith(".pkl"):
                require_terse(file.read(name))


def _require_one_directory(path: Path, start: int) -> None:
    """Makes sure that Python found an archive's directory where torch does: before the end is where the end says."""
    with path.open("rb") as file:
        size = file.seek(0, SEEK_END)
        file.seek(max(0, size - END))
        end = file.read()
    last = end[-22:-18] == b"PK\5\6" and end[-6:] == pack("<LH", min(start, 2**32 - 1), 0)
    large = end[-42:-38] == b"PK\6\7"
    if not last or (large and (unpack("<Q", end[-34:-26]), unpack("<Q", end[-50:-42])) != ((size - END,), (start,))):
        raise ValueError("it has more than one directory")


def _amiss(features: Tensor, labels: Tensor) -> str | None:
    """What is wrong with features and labels, but for the features' values; None if nothing is."""
    if features.ndim != 2 or not features.numel() or not features.is_floating_point():
        return f"has features of shape {tuple(features.shape)} and {features.dtype}, not (images, width) and floating"
    if labels.shape != features.shape[:1]:
        return f"has {len(features)} features and labels of shape {tuple(labels.shape)}: one label for each is needed"
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex() or labels.long().min() < 0:
        return f"has labels ({labels.dtype}) that are no integers from 0 on: number the classes"
    return None
