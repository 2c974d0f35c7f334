"""Tensors that are expensive to make, kept in a file under the data folder."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvt.data.download import only_process, unwritable
from kvt.files import atomically

Splits = dict[str, tuple[Tensor, Tensor]]
"""Images, or what stands for them, and labels of each split."""


def make_once(path: Path, data_dir: Path, make: Callable[[], Splits]) -> None:
    """Keeps in `path`, a .pt file in `data_dir/.cache`, what `make` returns, unless it is there.

    Harmless to repeat, to race and to kill. The folder may be deleted at any time.

    Raises:
        UserError: nothing can be stored there.
    """
    if is_whole(path):
        return
    with only_process(data_dir):
        if is_whole(path):
            return  # another process made it while this one waited
        for leftover in path.parent.glob("*.pt.*.tmp"):  # of a process that was killed
            leftover.unlink()
        _save(make(), path)


def is_whole(path: Path) -> bool:
    """Whether a file of tensors is there, in full."""
    try:
        torch.load(path, weights_only=True, mmap=True)
    except (OSError, RuntimeError):  # absent, or cut short
        return False
    return True


def _save(tensors: Splits, path: Path) -> None:
    """All of `tensors` in `path`, or an error and nothing."""
    try:
        with atomically(path) as part:
            torch.save(tensors, part)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise unwritable(path.parent, error) from error
