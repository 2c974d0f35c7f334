"""Read files of tensors: torch.save's format, without running code."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvt.system.errors import UserError
from kvt.system.files import require_file
from kvt.system.memory import require_memory

Splits = dict[str, tuple[Tensor, Tensor]]
"""Images or features, and labels, of each split."""
LAYOUT = '{"train": (features, labels), "test": (features, labels)}'


def read_tensors(path: Path, mmap: bool = False) -> Any:
    """Return what torch.save wrote: plain data and CPU tensors; code in the file is refused, not run.

    With `mmap`, tensors are mapped into memory instead of read at once. Raises exceptions of many types if the file is
    missing, damaged or not of torch.save.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch ignores the checksums
                raise ValueError(f"{damaged} is damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of tensors that torch deprecates
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def read_splits(path: Path) -> Splits:
    """Return what `torch.save({"train": (tensor, tensor), "test": (tensor, tensor)}, path)` wrote, memory-mapped.

    Raises UserError, naming the file, if it is missing, unreadable or of another layout.
    """
    size = require_file(path, "name another file").st_size
    require_memory(4 * size, f"{path}: {size:,} bytes of tensors")
    try:
        content = read_tensors(path, mmap=True)
    except Exception as error:
        raise UserError(f"{path} is no readable file of features: save it with torch.save, tensors only") from error
    if not isinstance(content, dict) or not {"train", "test"} <= content.keys():
        raise UserError(f"{path} is no file of features: save {LAYOUT}")
    splits: Splits = {}
    for split in ("train", "test"):
        pair = content[split]
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise UserError(f"{path}: {split!r} is no pair of tensors: save {LAYOUT}")
        splits[split] = (pair[0], pair[1])
    return splits


def read_features(path: Path, feature_dim: int | None = None) -> Splits:
    """Return features, float32 (N, feature_dim), and labels, int64 (N,), of "train" and "test".

    Raises UserError, naming the file, if it is unreadable, has other shapes or types, features that are not finite,
    or another `feature_dim` than the given one (default: any).
    """
    splits: Splits = {}
    for split, (features, labels) in read_splits(path).items():
        if problem := _problem(features, labels):
            raise UserError(f"{path}: {split!r} {problem}")
        splits[split] = (features.detach().to(torch.float32, copy=True), labels.to(torch.int64, copy=True))
        if not splits[split][0].isfinite().all():
            raise UserError(f"{path}: {split!r} has features that are infinite or not a number: compute them anew")
    train, test = (splits[split][0].shape[1] for split in ("train", "test"))
    if feature_dim not in (None, train):
        raise UserError(f"{path}: features are {train} wide, not {feature_dim}: remove the file")
    if train != test:
        raise UserError(f"{path}: features of 'train' are {train} wide, of 'test' {test}: they must be alike")
    return splits


def _problem(features: Tensor, labels: Tensor) -> str | None:
    """What is wrong with the layout, shapes and types of features and labels; None if nothing is."""
    if (
        features.layout != torch.strided
        or features.ndim != 2
        or not features.numel()
        or not features.is_floating_point()
    ):
        return f"has features of shape {tuple(features.shape)} and {features.dtype}, not (images, width) and floating"
    if labels.shape != features.shape[:1]:
        return f"has {len(features)} features and labels of shape {tuple(labels.shape)}: one label for each is needed"
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex() or labels.long().min() < 0:
        return f"has labels ({labels.dtype}) that are no integers from 0 on: number the classes"
    return None
