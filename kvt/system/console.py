"""Sets up every command: few log messages, a clean stop on Ctrl-C, and one line for a user's error."""

import logging
import os
import re
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from kvt.system.errors import UserError, mistake_in
from kvt.system.quoting import one_line, printable

IGNORED_WARNINGS = (
    "LeafSpec",  # deprecated in torch
    "smaller than the logging interval",  # the end of an epoch is logged too
    "requested to overfit",  # kvt's loaders yield the same batches in every epoch
    "callbacks used to create the checkpoint",  # a test runs without the callbacks of fit
    "exists and is not empty",  # a resumed run continues in its own folder
    "missing from font",  # the picture shows a box in place of the character
    "sync_dist=True",  # the means are synchronised before they are logged
)
NEWLINES = "\n\t"  # control characters that `tell` prints unchanged
CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which clusters announce that they will end a process."""
STOP_SIGNALS = (signal.SIGINT, *CLUSTER_SIGNALS)
"""The signals that stop a process: SIGINT (Ctrl-C) and `CLUSTER_SIGNALS`."""


@contextmanager
def signals_handled(handler: Any, numbers: Sequence[int]) -> Iterator[None]:
    """Context manager: set the handler of signals, and restore the old handlers at the end.

    Signals that the process ignores (SIG_IGN) stay ignored. A process that starts inside the context inherits the
    ignored signals. Outside the main thread, this context manager changes nothing.
    """
    before = set_handler(handler, numbers)
    try:
        yield
    finally:
        restore_handlers(before)


def set_handler(handler: Any, numbers: Sequence[int]) -> dict[int, Any]:
    """Set the handler of all signals that are not ignored, in the main thread only; return the old handlers."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Restore the handlers that `set_handler` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def say(text: str) -> None:
    """Write a note to stderr in the first DDP process. The output is unbuffered, so a signal handler may call this."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{printable(text, keep=NEWLINES)}\n".encode())


def tell(text: object, end: str = "\n") -> None:
    """Print the output of a command. Escapes replace control characters."""
    print(printable(text, keep=NEWLINES), end=end, flush=True)


def table(summary: Mapping[str, Any]) -> str:
    """Return names and values in two columns.

    >>> print(table({"test/acc": 0.98765, "parameters": 12345}))
    test/acc    0.9877
    parameters  12,345
    """
    rows = {printable(name): printable(_readable(value)) for name, value in summary.items()}
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_readable(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def run(command: Callable[[], object]) -> None:
    """Run a command. Exit with 2 after a UserError or OSError, printed in one line; exit with 130 after Ctrl-C."""
    sys.path.append(os.getcwd())  # lets Python find a user's classes in the working directory
    silence_libraries()
    os.environ["MPLBACKEND"] = "agg"  # kvt writes pictures to files, and other backends may not be installed
    try:
        command()
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
    except Exception as error:
        if (mistake := mistake_in(error)) is None:
            raise
        print(f"error: {one_line(str(mistake))}", file=sys.stderr)
        sys.exit(2)


def silence_libraries() -> None:
    """Silence Lightning's messages below WARNING and `IGNORED_WARNINGS`; give tqdm a lock that starts no process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # the user requests this output by a flag
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}")
    if "tqdm" in sys.modules:  # since Python 3.14, its own lock starts a process, which warns if kvt is killed
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())


class OneLineParser(ArgumentParser):
    """An argument parser that raises a one-line UserError instead of printing the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(with_nearest(" ".join(message.split()), self._option_string_actions)) from ex


def with_nearest(message: str, flags: Iterable[str]) -> str:
    """Add the most similar flag to a parser's message about an unknown flag."""
    if flag := re.search(r"[Uu]nrecognized arguments: --([\w.]+)", message):
        near = get_close_matches(flag[1], [name.lstrip("-") for name in flags], n=1)
        message += f": did you mean --{near[0]}?" if near else ": see --help"
    return message
