"""What a command may do with a hostile input: run correctly, or end with code 2 and one line that names the culprit."""

import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from kvt.system.console import run

MAX_SECONDS = 120  # that an input may take
MAX_BYTES = 6 * 2**30  # that a command may allocate


def fuzz(share: float, **inputs: SearchStrategy) -> Callable[[Callable], Callable]:
    """Give a test its share of all hostile inputs; it takes each by name, and the fixture `held`."""
    profile = settings.get_profile("fuzz")
    examples = settings(profile, max_examples=max(1, round(share * profile.max_examples)))
    return lambda test: pytest.mark.fuzz(examples(given(**inputs)(test)))


@pytest.fixture
def held(in_tmp_dir) -> Iterator[Callable[..., str | None]]:
    """Run commands in the working directory.

    The function takes what `kvt.system.console.run` takes, and words of which an error must have one. It returns None
    if the command ran, else the error; then nothing else may be left behind.
    """

    def call(command: Callable[[], object], *named: str) -> str | None:
        before = tree()
        err, code = StringIO(), 0
        with no_longer_than(MAX_SECONDS), redirect_stderr(err), redirect_stdout(StringIO()):
            try:
                run(command)
            except SystemExit as ended:
                code = ended.code or 0
        if code == 0:
            shutil.rmtree("lightning_logs", ignore_errors=True)
            return None
        line = require_refusal(code, err.getvalue())
        assert len(line) < 1000, line
        assert not named or any(word in line for word in named), (named, line)
        assert tree() == before
        return line

    allocated = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES + allocated, hard))
    yield call
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def require_refusal(code: int, err: str) -> str:
    """Return the line on stderr of a command that has refused its input."""
    assert code == 2, (code, err)
    (line,) = err.splitlines()
    assert line.startswith("error: "), line
    return line


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Context manager: fail a block that hangs."""

    def late(*_: object) -> None:
        pytest.fail(f"still at it after {seconds} s")  # no OSError, which a reader of files may expect

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def tree() -> list[tuple[str, int]]:
    """Return every file and folder of the working directory, links not followed, with its size."""
    return sorted((str(path), path.lstat().st_size if path.is_file() else 0) for path in Path().rglob("*"))
