"""What every hostile input is held to: a correct run, or exit code 2 and one line that names the culprit."""

import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from kvt.system.console import run

MAX_SECONDS = 120  # seconds that an input may take
ROOM = 6 * 2**30  # bytes that a process may take beyond those it has


def fuzz(share: float, **inputs: SearchStrategy) -> Callable[[Callable], Callable]:
    """Makes a test of its part of all hostile inputs; it takes each by name, and the fixture `held`."""
    profile = settings.get_profile("fuzz")
    examples = settings(profile, max_examples=max(1, round(share * profile.max_examples)))
    return lambda test: pytest.mark.fuzz(examples(given(**inputs)(test)))


class Held:
    """Tries inputs, and counts what became of them.

    Attributes:
        count: of "refused" and "ran".
    """

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __call__(self, command: Callable[[], object], *named: str) -> str | None:
        """Runs a command in the working directory, as the command line would.

        Args:
            command: what `kvt.system.console.run` is given.
            named: of these words one must be in the line, if there is a line.

        Returns:
            None if it ran; else the line, which is all that it may have left.
        """
        before = tree()
        err, code = StringIO(), 0
        with no_longer_than(MAX_SECONDS), redirect_stderr(err), redirect_stdout(StringIO()):
            try:
                run(command)
            except SystemExit as ended:
                code = ended.code or 0
        if code == 0:
            self.count["ran"] += 1
            shutil.rmtree("lightning_logs", ignore_errors=True)
            return None
        lines = err.getvalue().splitlines()
        assert code == 2, (code, lines)
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: "), lines
        assert len(lines[0]) < 1000, lines
        assert not named or any(word in lines[0] for word in named), (named, lines)
        assert tree() == before
        self.count["refused"] += 1
        return lines[0]


@pytest.fixture
def held(record_property, in_tmp_dir) -> Iterator[Held]:
    """Tries inputs as `Held` does; what became of them is part of the summary of the session."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (ROOM + memory(), hard))
    held = Held()
    try:
        yield held
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        record_property("inputs", dict(held.count))


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Fails a block that hangs."""

    def late(*_: object) -> None:
        pytest.fail(f"still at it after {seconds} s")  # no OSError, which a reader of files may expect

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def memory() -> int:
    """The bytes of data that this process has."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


def tree() -> list[tuple[str, int]]:
    """Every file and folder of the working directory, links not followed, with its size."""
    found = (os.path.join(folder, name) for folder, *names in os.walk(".") for name in (*names[0], *names[1]))
    return sorted((path, os.lstat(path).st_size if not os.path.isdir(path) else 0) for path in found)
