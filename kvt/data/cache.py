"""Tensors that are expensive to make, kept in a file under the data folder."""

from collections.abc import Callable
from pathlib import Path

import torch

from kvt.data.download import only_process, unwritable
from kvt.data.tensors import Splits
from kvt.errors import UserError
from kvt.files import atomically


def make_once(path: Path, data_dir: Path, make: Callable[[], Splits], read: Callable[[], object]) -> None:
    """Keeps in `path`, a .pt file in `data_dir/.cache`, what `make` returns, unless `read` can read it there.

    Harmless to repeat, to race and to kill. The folder may be deleted at any time.

    Raises:
        UserError: nothing can be stored there.
    """
    if is_kept(read):
        return
    with only_process(data_dir):
        if is_kept(read):
            return  # another process made it while this one waited
        try:
            for leftover in path.parent.glob("*.pt.*.tmp"):  # of a process that was killed
                leftover.unlink()
        except OSError as error:
            raise unwritable(path.parent, error) from error
        _save(make(), path)


def is_kept(read: Callable[[], object]) -> bool:
    """Whether `read` finds its file as it should be: there, as it was written, and of the right content."""
    try:
        read()
    except UserError:
        return False
    return True


def _save(tensors: Splits, path: Path) -> None:
    """All of `tensors` in `path`, or an error and nothing."""
    try:
        with atomically(path) as part, part.open("wb") as file:
            torch.save(tensors, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise unwritable(path.parent, error) from error
