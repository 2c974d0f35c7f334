"""Read files of tensors without running code, and cache tensors in the data folder, which users may share."""

import hashlib
import warnings
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvt.data.files import once, require_file
from kvt.system import UserError, atomically

Splits = dict[str, tuple[Tensor, Tensor]]
"""A dict that maps each split to a tensor of images or features and a tensor of labels."""
SPLITS = ("train", "test")
LAYOUT = '{"train": (features, labels), "test": (features, labels)}'


def read_tensors(path: Path, mmap: bool = False) -> Any:
    """Return the content, plain data and CPU tensors, of a file that torch.save wrote. Code in the file is never run.

    Raises exceptions of many types if the file is missing, is damaged, contains code, or was not written by torch.save.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load does not verify checksums
                raise ValueError(f"{damaged} is damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about deprecated kinds of tensors
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def read_splits(path: Path, names: Iterable[str] = SPLITS) -> Splits:
    """Return the memory-mapped tensors of a file with the content `LAYOUT`; raise UserError if they are unreadable."""
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
    """Return features, float32 (N, feature_dim), and labels, int64 (N,), of "train" and "test".

    The file may have other floating-point and integer dtypes. Raises UserError with the name of the file if a label is
    negative, a feature is not finite as float32, or dtypes or shapes do not fit.
    """
    splits = read_splits(path)
    width = splits["train"][0].shape[-1:]
    for split, (features, labels) in splits.items():
        if not (features.is_floating_point() and features.shape == (*labels.shape, *width) and features.ndim == 2):
            raise UserError(
                f"{path}: {split!r} has features {tuple(features.shape)}, {features.dtype}, and labels "
                f"{tuple(labels.shape)}: floating (images, {width[0] if width else 'width'}) and (images,) are needed"
            )
        whole = labels.to(torch.int64, copy=True)  # torch cannot compare some unsigned dtypes with 0
        if not len(labels) or labels.is_floating_point() or whole.min() < 0:
            raise UserError(f"{path}: {split!r} needs integer labels, at least 0")
        splits[split] = (features.detach().to(torch.float32, copy=True), whole)
        require_finite(splits[split][0], f"{path}: {split!r}")
    return splits


def require_finite(features: Tensor, name: str) -> None:
    """Raise UserError with the number of rows and the first row in which a feature is infinite or not a number."""
    if len(rows := (~features.isfinite().all(1)).nonzero()):
        raise UserError(
            f"{name} has {len(rows)} rows with features that are not finite, the first is row {int(rows[0])}"
        )


def cache_splits(path: Path, make: Callable[[], Splits], read: Callable[[Path], Splits]) -> None:
    """Write the result of `make` to `path`, a .pt file in `data_dir/.cache`, unless `read` can read that file."""

    def is_cached() -> bool:
        with suppress(UserError):
            return bool(read(path))
        return False

    def save() -> None:
        for leftover in path.parent.glob("*.pt.*.tmp"):  # files of a killed process
            leftover.unlink()
        tensors = make()
        with atomically(path) as part, part.open("wb") as file:
            torch.save(tensors, file)

    once(path.parents[1], is_cached, save)
