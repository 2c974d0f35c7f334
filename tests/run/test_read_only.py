"""Folders that cannot be written: one line that names them, and their files stay as they are."""

import ctypes
import os
from pathlib import Path

import pytest

from tests.conftest import CONFIGS, QUIET, SMALL_LISTS
from tests.helpers.runs import contents
from tests.helpers.sandbox import LIBC, command, forked

pytestmark = pytest.mark.slow

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "1"]
FIRST = Path("lightning_logs/reverse/kv/version_0")


def forbid(path: Path) -> None:
    """Take away the permission to write in a folder and those below it, from root, too."""
    for folder in (path, *path.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o555)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # of capset(2), version 3
    assert LIBC.capset(header, nothing) == 0
    assert not os.access(path, os.W_OK)


def test_runs(in_tmp_dir):
    forked(_runs)


def _runs() -> None:
    assert command(*RUN).code == 0
    (FIRST / "result.json").rename("result.json")  # as if it had been killed at its end
    before = contents(Path("lightning_logs"))
    forbid(Path("lightning_logs"))
    last = str(FIRST / "checkpoints" / "last.ckpt")
    for words in (
        RUN,
        ["fit", "--resume", str(FIRST), *QUIET[:2]],
        [*RUN, "--ckpt_path", last, "--max_epochs", "2"],
        ["predict", "--ckpt_path", last, *QUIET],
        ["maps", "--ckpt_path", last, "--out", "lightning_logs/maps.png"],
    ):
        command(*words).refused("lightning_logs")
    assert sorted(os.listdir()) == ["lightning_logs", "result.json"]
    assert command(*RUN, "--default_root_dir", "elsewhere").code == 0
    assert command("test", "--ckpt_path", last, *QUIET).code == 0
    assert contents(Path("lightning_logs")) == before
