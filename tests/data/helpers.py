"""User errors, and the files and rows of a test."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvt.system import UserError
from kvt.tasks import TaskData


def user_error(action: Callable[[], object]) -> str:
    """The message of the UserError that `action` raises, which must be one line."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def files_in(folder: Path) -> set[str]:
    """All files below a folder except the lock."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".cache/data.lock"}


def all_rows(data: TaskData, split: str) -> tuple[torch.Tensor, ...]:
    """Return what a split serves, as one batch."""
    return next(iter(data.make_batches(*data.splits[split], batch_size=10**6)))
