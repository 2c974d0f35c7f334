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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from io import TextIOWrapper
from secrets import token_hex
from tempfile import gettempdir
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
UNION = re.compile(
    r"(?:Does not validate against any of the Union subtypes )?Subtypes: .*? Errors: - "
    r"(?:Expected a <class 'list'> - (?=Option))?(.*?)"
    r"(?: - Expected a <class 'NoneType'>)? Given value type: .*?(?: Given value: ([^()]*))?$"
)
"""jsonargparse's message for a value that fits no member of a Union type; kvt shows only the first reason."""
PLAIN = {
    r"(?:- )?Expected a path but \S+ either not accessible or invalid - ": "",
    r"Expected a dot import path string: (\S+?)(?=\. Got| - |$)": r"no class \1: check the name, or use its path",
    r": (.+?) - \1(?=\. Got value|$)": r": \1",  # removes a repeated reason
}
"""Patterns in jsonargparse's messages about classes, and their replacements."""
EXTRAS = ("datasets", "ray", "tokenizers")
"""The names of packages that an extra of kvt with the same name installs, as in "kvt[ray]"."""
NEWLINES = "\n\t"  # control characters that `tell` prints unchanged
CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which clusters announce that they will end a process."""
STOP_SIGNALS = (signal.SIGINT, *CLUSTER_SIGNALS)
"""The signals that stop a process: SIGINT (Ctrl-C) and `CLUSTER_SIGNALS`."""


FIRST_ERROR = "KVT_FIRST_ERROR"
"""The environment variable with the path of a file that the first failing process of a run creates.

Only the process that creates the file prints an error.
"""


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


def share_errors() -> None:
    """Make the child processes of this process print only the error of the first child that fails."""
    if _is_first_process():
        os.environ[FIRST_ERROR] = os.path.join(gettempdir(), f"kvt-error-{token_hex(8)}")


def _is_first_to_fail() -> bool:
    if (path := os.environ.get(FIRST_ERROR)) is None:
        return _is_first_process()
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # an error printed twice is better than an error not printed
        pass
    return True


def _rank() -> str:
    """Return a prefix for error messages such as "rank 1: ", or "" if the run has a single process."""
    return f"rank {os.environ.get('LOCAL_RANK', '0')}: " if FIRST_ERROR in os.environ else ""


def _is_first_process() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Context manager: ignore errors of printing to a pipe whose reader has ended, such as `tee` after Ctrl-C."""
    with redirect_stdout(_UnbreakableStream(sys.stdout)), redirect_stderr(_UnbreakableStream(sys.stderr)):
        yield


class _UnbreakableStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            _discard_output(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _discard_output(self._stream)


def _discard_output(stream: Any) -> None:
    """Redirect a stream to /dev/null. Otherwise Python would report the broken pipe again at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def run(command: Callable[[], object]) -> None:
    """Run a command. After a UserError, print one line and exit with 2; after a signal, exit with 128 + its number."""
    _replace_closed_streams()
    with suppress(OSError):  # if the working directory was deleted, a later function reports it
        sys.path.append(os.getcwd())  # lets Python find a user's classes in the working directory
    silence_libraries()
    threading.excepthook = _thread_excepthook
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
        message = user_error(error)
        if not _is_first_to_fail():
            sys.exit(1 if message is None else 2)
        if message is None:
            if rank := _rank():
                error.add_note(f"{rank}this process of the run is the first that failed")
            raise
        print(f"error: {_rank()}{one_line(message)}", file=sys.stderr)
        sys.exit(2)


def _stop(number: int, frame: object) -> None:
    raise Stopped(128 + number)


def _replace_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams, as in a daemon.

    Otherwise a file that is opened later would get the descriptor 0, 1 or 2.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)


def _thread_excepthook(failed: threading.ExceptHookArgs) -> None:
    """Print a thread's traceback, unless a resource limit caused the error.

    TensorBoard's writer passes such an error on to the main thread.
    """
    if failed.exc_value is None or resource_limit_message(failed.exc_value) is None:
        threading.__excepthook__(failed)


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
        if isinstance(cause, UserError) and not (message and isinstance(cause, _ParsingError)):
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
    """An argument parser, or a mixin for parsers, that raises a one-line UserError instead of printing the usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = " ".join(message.split())
        _, _, unknown = message.partition("unrecognized arguments: ")
        message = re.sub(r"(arguments are required: )(?=\w)", r"\1--", message)
        message = re.sub(r'Parser key "(?:model\.|data\.|trainer\.)?([\w.]+)":', r"--\1:", message)
        message = UNION.sub(lambda match: ". Got value: ".join(filter(None, match.groups())), message)
        for pattern, plain in PLAIN.items():
            message = re.sub(pattern, plain, message)
        quotes = r"\g<0>: in YAML, write no, yes, off and on in quotes, as 'no'"
        message = re.sub(r"<class 'str'>\. Got value: (?:True|False)$", quotes, message)
        if (flag := unknown.partition(" ")[0].partition("=")[0]).startswith("--"):
            bare = flag.lstrip("-").rpartition(".")[2]  # "lr" for the flag --model.lr
            names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            nearest = [name for name in names if bare.startswith(f"{name}_") or name.startswith(f"{bare}_")]
            # names are compared without "--", because a common prefix would make all flags look similar
            nearest += get_close_matches(bare, names, n=1, cutoff=0.75)
            message += f": did you mean --{nearest[0]}?" if nearest else ": see --help"
        raise _ParsingError(message) from ex


class _ParsingError(UserError):
    pass
