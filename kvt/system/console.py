"""Sets up every command: fast imports, few log messages, a clean stop on Ctrl-C, and one line for a user's error."""

import atexit
import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from io import TextIOWrapper
from typing import Any, NoReturn

from kvt.system.errors import UserError, exception_chain, is_out_of_memory, resource_limit_message
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
EXTRAS = ("datasets", "ray", "tokenizers")
"""The names of packages that an extra of kvt with the same name installs, as in "kvt[ray]"."""
NEWLINES = "\n\t"  # control characters that `tell` prints unchanged
CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which clusters announce that they will end a process."""
STOP_SIGNALS = (signal.SIGINT, *CLUSTER_SIGNALS)
"""The signals that stop a process: SIGINT (Ctrl-C) and `CLUSTER_SIGNALS`."""


class Stopped(SystemExit):
    """The exception that a signal in `CLUSTER_SIGNALS` raises. The exit code is 128 + the number of the signal."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager: turn off garbage collection, a quarter of the import time; then freeze the new objects."""
    os.getcwd()  # raises OSError if the working directory was deleted; MKL would end the process
    first = gc.get_freeze_count() == 0
    gc.disable()
    with exit_on_signals():
        try:
            yield
        finally:
            if first:  # a second call of freeze would also keep garbage
                gc.freeze()
                atexit.register(gc.unfreeze)  # without this, nanobind, a part of triton, reports leaks
            gc.enable()
            silence_libraries()  # importing Lightning resets its log levels


def collect_garbage_seldom() -> None:
    """Run the garbage collector at 1 % of its usual rate, because reading many results creates little garbage."""
    gc.set_threshold(100_000, 50, 1000)


def exit_on_signals() -> AbstractContextManager[None]:
    """Context manager: let a signal end the process at once. A package's import might catch an exception."""

    def exit_now(number: int, frame: object) -> None:
        say("stopped")
        os._exit(128 + number)

    return signals_handled(exit_now, STOP_SIGNALS)


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
    if _is_first_process():
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


def _is_first_process() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _discard_output(stream: Any) -> None:
    """Redirect a stream to /dev/null. Otherwise Python would report the broken pipe again at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def run(command: Callable[[], object]) -> None:
    """Run a command. After a UserError, print one line and exit with 2; after a signal, exit with 128 + its number."""
    with suppress(OSError):  # if the working directory was deleted, a later function reports it
        sys.path.append(os.getcwd())  # lets Python find a user's classes in the working directory
    silence_libraries()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # prevents an error in terminals without UTF-8
    os.environ["MPLBACKEND"] = "agg"  # kvt writes pictures to files, and other backends may not be installed
    try:
        with signals_handled(_stop, CLUSTER_SIGNALS):
            command()
        print(end="", flush=True)  # raises an error here if stdout is broken or its disk is full
    except Stopped:
        say("stopped")
        raise
    except (KeyboardInterrupt, SystemExit) as ended:
        # after Ctrl-C, the Trainer raises SystemExit with code 1
        if not any(isinstance(cause, KeyboardInterrupt) for cause in exception_chain(ended)):
            raise
        say("stopped")
        sys.exit(130)
    except BrokenPipeError:  # for example in `kvt generate | head`
        _discard_output(sys.stdout)
        sys.exit(1)
    except Exception as error:
        if (message := user_error(error)) is None:
            raise
        print(f"error: {one_line(message)}", file=sys.stderr)
        sys.exit(2)


def _stop(number: int, frame: object) -> None:
    raise Stopped(128 + number)


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


def user_error(error: BaseException) -> str | None:
    """Return the message for the user if a mistake or a resource limit caused an exception, else None.

    If the chain has several UserErrors, the deepest one has the message, because parsers wrap the errors that they
    catch. Of several errors of parsers themselves, the outermost error has the message.
    """
    message = None
    for cause in exception_chain(error):
        if isinstance(cause, UserError):
            message = str(cause)
        elif is_out_of_memory(cause):
            message = f"out of memory: choose a smaller model, batch or data set ({cause!s:.200})"
        elif isinstance(cause, ModuleNotFoundError) and cause.name in EXTRAS:
            message = f'a package is missing: pip install "kvt[{cause.name}]"'
        elif isinstance(cause, ModuleNotFoundError) and (remedy := re.search("`(pip install .*)`", str(cause))):
            message = f"a package is missing: {remedy[1]}"
        elif isinstance(cause, FileNotFoundError) and cause.filename is None:  # raised by os.getcwd
            message = "the working directory is gone: change to one that exists"
    return message or resource_limit_message(error)


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
