"""A machine that has less of something: disks that are full or closed, few files, few processes."""

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvt.cli.main import main
from tests.helpers.drivers import fork_server
from tests.helpers.hostile import MAX_SECONDS, no_longer_than, require_refusal

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000  # of unshare(2)
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # of mount(2)
LIBC = ctypes.CDLL(None, use_errno=True)


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def refused(self, *named: str) -> str:
        """Return the error of a command that ended with code 2 and one line, which has these words."""
        line = require_refusal(self.code, self.err)
        assert all(words in line for words in named), (named, line)
        return line


def command(*words: str) -> Ended:
    """Run a command of the command line in this process; `fit` ends with its test."""
    out, err, code = StringIO(), StringIO(), 0
    with no_longer_than(MAX_SECONDS), redirect_stdout(out), redirect_stderr(err):
        try:
            sys.argv = ["kvt", *(("run", *words[1:]) if words[0] == "fit" else words)]
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def sandboxed(scenario: Callable[..., None], *args: Any) -> None:
    """Call a function like `forked`, in a process that may mount disks that no other process sees."""
    if not _can_mount():
        pytest.skip("this machine lets nobody mount a disk of their own")
    forked(_mounting, scenario, *args)


def forked(scenario: Callable[..., None], *args: Any) -> None:
    """Call a function in a process of its own, in the working directory; its failure is the caller's."""
    with ProcessPoolExecutor(1, fork_server(), initializer=_enter, initargs=(Path.cwd(), dict(os.environ))) as pool:
        pool.submit(scenario, *args).result()


def _enter(folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)


@cache
def _can_mount() -> bool:
    try:
        forked(_mounting, int)
    except (OSError, BrokenProcessPool):
        return False
    return True


def _mounting(scenario: Callable[..., None], *args: Any) -> None:
    user, group = os.getuid(), os.getgid()
    _checked(LIBC.unshare(NEW_MOUNTS | NEW_USERS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _checked(LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    scenario(*args)


def disk(path: Path, kibibytes: int = 2**20, files: int = 10_000, there: bool = False) -> None:
    """Mount a disk of this size, or change the size of one that is there."""
    path.mkdir(exist_ok=True)
    room = f"size={kibibytes}k,nr_inodes={files}".encode()
    _checked(LIBC.mount(b"tmpfs", os.fsencode(path), b"tmpfs", REMOUNT if there else 0, room))


def read_only(path: Path) -> None:
    """Make a folder one that not even root can write."""
    _checked(LIBC.mount(os.fsencode(path), os.fsencode(path), None, BIND, None))
    _checked(LIBC.mount(None, os.fsencode(path), None, BIND | REMOUNT | READ_ONLY, None))


def _checked(code: int) -> None:
    if code:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
