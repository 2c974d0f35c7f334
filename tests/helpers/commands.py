"""Commands in this process, or in one that is forked from a process that has everything imported."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from kvt.commands import main
from tests.helpers.drivers import fork_server

MAX_SECONDS = 120  # that a command may take


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


def require_refusal(code: int, err: str) -> str:
    """Return the line on stderr of a command that has refused its input."""
    assert code == 2, (code, err)
    (line,) = err.splitlines()
    assert line.startswith("error: "), line
    return line


def command(*words: str) -> Ended:
    """Run a command of the command line in this process; `fit` ends with its test."""
    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            sys.argv = ["kvt", *(("run", *words[1:]) if words[0] == "fit" else words)]
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def forked(scenario: Callable[..., None], *args: Any) -> None:
    """Call a function in a process of its own, in the working directory; its failure is the caller's."""
    with ProcessPoolExecutor(1, fork_server(), initializer=_enter, initargs=(Path.cwd(), dict(os.environ))) as pool:
        pool.submit(scenario, *args).result()


def _enter(folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
