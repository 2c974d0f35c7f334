"""Read files of tensors without running code in them, and cache tensors in the data folder, which users may share."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvt.data.files import once, require_file
from kvt.system import UserError, atomically

Splits = dict[str, tuple[Tensor, Tensor]]  # for each split: a tensor of images or features, and one of labels
SPLITS = ("train", "test")
LAYOUT = '{"train": (features, labels), "test": (features, labels)}'


def read_tensors(path: Path, mmap: bool = False) -> Any:
    """Return the plain data and CPU tensors that torch.save wrote to a file."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def read_splits(path: Path, names: Iterable[str] = SPLITS) -> Splits:
    """Return the splits `names` of a file of the form `LAYOUT`, memory-mapped; UserError if a split is unreadable."""
    require_file(path, "name another file")
    try:
        content = read_tensors(path, mmap=True)
        return {split: (torch.as_tensor(content[split][0]), torch.as_tensor(content[split][1])) for split in names}
    except Exception as error:  # torch.load raises errors of many types
        reason = f"{path} is not a readable feature file ({repr(error).splitlines()[0]:.100})"
        raise UserError(f"{reason}: write it with torch.save({LAYOUT})") from error


def fingerprint(splits: Splits) -> str:
    """Return a hash of the values, dtypes and shapes of tensors, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for tensor in chain.from_iterable(splits.values()):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()[:16]


def read_features(path: Path) -> Splits:
    """Return a dict that maps "train" and "test" to features, float32 (N, feature_dim), and labels, int64 (N,).

    In the file, features may have any real dtype, and labels any integer dtype. Raises UserError with the path of the
    file if it is missing or unreadable, a split is empty, a label is negative, a feature is not finite as float32,
    labels have a floating-point dtype, or a shape is wrong.
    """
    splits = read_splits(path)
    width = splits["train"][0].shape[-1:]
    for split, (found, classes) in splits.items():
        features, labels = found.detach().to(torch.float32, copy=True), classes.to(torch.int64, copy=True)
        fits = features.ndim == 2 and features.shape == (*labels.shape, *width) and len(labels) > 0
        if not fits or classes.is_floating_point() or labels.min() < 0 or not features.isfinite().all():
            needs = "features (images, width), which are finite, and labels (images,), integers from 0 on"
            raise UserError(f"{path}: {split!r} needs {needs}")
        splits[split] = (features, labels)
    return splits


def cache_splits(path: Path, make: Callable[[], Splits], read: Callable[[Path], Splits]) -> None:
    """Write the result of `make` to `path`, a .pt file in `data_dir/.cache`, unless `read` can read that file."""

    def is_cached() -> bool:
        with suppress(UserError):
            return bool(read(path))
        return False

    def save() -> None:
        tensors = make()
        with atomically(path) as part, part.open("wb") as file:
            torch.save(tensors, file)

    once(path.parents[1], is_cached, save)
