"""A machine that has less of something: disks that are full or closed, few files, few processes."""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvt.cli.main import main, run_lightning
from kvt.system.console import run
from tests.helpers.hostile import MAX_SECONDS, no_longer_than

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000  # of unshare(2)
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # of mount(2)
LIBC = ctypes.CDLL(None, use_errno=True)


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    def refused(self, *named: str) -> str:
        """The line of a command that has ended with code 2 and one line, which names these."""
        lines = self.err.splitlines()
        assert self.code == 2, self
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), lines
        assert all(words in lines[0] for words in named), (named, lines)
        return lines[0]


def command(*words: str) -> Ended:
    """A command of the command line, in this process: `fit` ends with its test."""
    out, err, code = StringIO(), StringIO(), 0
    with no_longer_than(MAX_SECONDS), redirect_stdout(out), redirect_stderr(err):
        try:
            if words[0] == "fit":
                run(lambda: run_lightning(words, test=True))
            else:
                sys.argv = ["kvt", *words]
                main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def sandboxed(scenario: Callable[..., None], *args: Any) -> None:
    """Calls a function in a process of its own, which may mount what it likes, in the working directory.

    Its failure is the caller's.
    """
    if not _can_mount():
        pytest.skip("this machine lets nobody mount a disk of their own")
    forked(_mounting, scenario, *args)


def forked(scenario: Callable[..., None], *args: Any) -> None:
    """Calls a function in a process of its own, in the working directory; its failure is the caller's."""
    if failure := _forked(scenario, *args):
        pytest.fail(failure, pytrace=False)


def disk(path: Path, kibibytes: int = 2**20, files: int = 10_000, there: bool = False) -> None:
    """Mounts a disk with room for so much, or changes what there is room for on one that is there."""
    path.mkdir(exist_ok=True)
    room = f"size={kibibytes}k,nr_inodes={files}".encode()
    _checked(LIBC.mount(b"tmpfs", os.fsencode(path), b"tmpfs", REMOUNT if there else 0, room))


def used(path: Path) -> tuple[int, int]:
    """The KiB and the files on a disk."""
    counted = os.statvfs(path)
    blocks, files = counted.f_blocks - counted.f_bfree, counted.f_files - counted.f_ffree
    return blocks * counted.f_frsize // 1024, files


def leave(path: Path, kibibytes: int | None, files: int | None) -> None:
    """Makes a disk one that has room for so many more; None for as much as anybody wants."""
    before = used(path)
    room = {"kibibytes": kibibytes, "files": files}
    disk(path, there=True, **{k: n + b for (k, n), b in zip(room.items(), before, strict=True) if n is not None})


def read_only(path: Path, closed: bool = True) -> None:
    """Makes a folder one that cannot be written, even by root; or opens it again."""
    if closed:
        _checked(LIBC.mount(os.fsencode(path), os.fsencode(path), None, BIND, None))
    _checked(LIBC.mount(None, os.fsencode(path), None, BIND | REMOUNT | (READ_ONLY if closed else 0), None))


@cache
def _can_mount() -> bool:
    return _forked(_mounting, int) is None


def _forked(function: Callable[..., None], *args: Any) -> str | None:
    """Calls a function in a process that is forked from one that has everything imported; returns its traceback."""
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(["kvt.training.lightning_cli", "kvt.study.runner", "tests.helpers.sandbox"])
    answer, their_end = context.Pipe(duplex=False)
    process = context.Process(target=_answering, args=(their_end, Path.cwd(), dict(os.environ), function, args))
    process.start()
    their_end.close()
    try:
        return answer.recv()
    except EOFError:
        return f"the process ended with {process.exitcode}"
    finally:
        process.join(MAX_SECONDS)
        process.kill()


def _answering(
    answer: Connection, folder: Path, environment: dict[str, str], function: Callable[..., None], args: Sequence[Any]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    try:
        function(*args)
    except BaseException:
        answer.send(traceback.format_exc())
    else:
        answer.send(None)


def _mounting(scenario: Callable[..., None], *args: Any) -> None:
    """Calls a function where what it mounts is seen by nobody else."""
    user, group = os.getuid(), os.getgid()
    _checked(LIBC.unshare(NEW_MOUNTS | NEW_USERS))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _checked(LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
    scenario(*args)


def _checked(code: int) -> None:
    if code:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
