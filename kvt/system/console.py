"""Setup of every command: quick imports, few log messages, a clean Ctrl-C, user errors in one line."""

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
from types import ModuleType
from typing import Any, NoReturn

from kvt.system.errors import UserError, exception_chain, is_out_of_memory, resource_limit_message
from kvt.system.quoting import one_line, printable

IGNORED_WARNINGS = (
    "LeafSpec",  # deprecated in torch
    "smaller than the logging interval",  # the end of an epoch is logged too
    "requested to overfit",  # our loaders serve the same batches in every epoch
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
"""jsonargparse's message for a value that fits no member of a Union type; only the first reason is shown."""
PLAIN = {
    r"(?:- )?Expected a path but \S+ either not accessible or invalid - ": "",
    r"Expected a dot import path string: (\S+?)(?=\. Got| - |$)": r"no class \1: check the name, or use its path",
    r": (.+?) - \1(?=\. Got value|$)": r": \1",  # the same reason twice
}
"""Patterns in jsonargparse's messages about classes, and their replacements."""
EXTRAS = {name: name for name in ("datasets", "ray", "tokenizers")}
EXTRAS |= {"huggingface_hub": "hub", "onnxscript": "onnx", "trackio": "loggers"}
"""The extra of kvt that installs a package, as in "kvt[hub]", by the package's name."""
NEWLINES = "\n\t"  # control characters that output may contain
CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals by which clusters announce that they will end a process."""
STOP_SIGNALS = (signal.SIGINT, *CLUSTER_SIGNALS)
"""The signals that ask a process to stop: Ctrl-C, and `CLUSTER_SIGNALS`."""


FIRST_ERROR = "KVT_FIRST_ERROR"
"""The environment variable with the path of a file that the first failing process of a run creates.

Only this process prints its error.
"""


class Stopped(SystemExit):
    """The exception raised by a signal in `CLUSTER_SIGNALS`; the exit code is 128 + the signal's number."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager: import without garbage collection, a quarter of the time; then freeze the new objects."""
    os.getcwd()  # raises if the working directory was deleted, which makes MKL end the process
    first = gc.get_freeze_count() == 0
    gc.disable()
    with exit_on_signals():
        try:
            yield
        finally:
            if first:  # a second freeze would keep garbage
                gc.freeze()
                atexit.register(gc.unfreeze)  # otherwise nanobind, in triton, reports leaks
            gc.enable()
            silence_libraries()  # importing Lightning resets its log levels


def collect_garbage_seldom() -> None:
    """Run the garbage collector a hundredth as often, because reading many results creates hardly any garbage."""
    gc.set_threshold(100_000, 50, 1000)


def exit_on_signals() -> AbstractContextManager[None]:
    """Context manager: let a signal end the process at once; an exception might be caught by a package's import."""

    def exit_now(number: int, frame: object) -> None:
        say("stopped")
        os._exit(128 + number)

    return signals_handled(exit_now, STOP_SIGNALS)


@contextmanager
def signals_handled(handler: Any, numbers: Sequence[int]) -> Iterator[None]:
    """Context manager: set the handler of signals, and restore the old handlers at the end.

    Signals that the process ignores (SIG_IGN) stay ignored, and processes started inside ignore them, too. Outside the
    main thread, nothing is changed.
    """
    before = set_handler(handler, numbers)
    try:
        yield
    finally:
        restore_handlers(before)


def set_handler(handler: Any, numbers: Sequence[int]) -> dict[int, Any]:
    """Set the handler of signals in the main thread, except of ignored signals; return the old handlers."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def restore_handlers(before: Mapping[int, Any]) -> None:
    """Restore the handlers that `set_handler` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)


def say(text: str) -> None:
    """Write a note to stderr from the first DDP process; unbuffered, so that a signal handler may call it."""
    if _is_first_process():
        with suppress(OSError):
            os.write(2, f"{printable(text, keep=NEWLINES)}\n".encode())


def tell(text: object, end: str = "\n") -> None:
    """Print a command's output, with control characters spelled out."""
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
    """Make the processes that this one starts print only the error of the first process that fails."""
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
    """Return the beginning of an error message, "rank 1: ", if the process is one of several, else ""."""
    return f"rank {os.environ.get('LOCAL_RANK', '0')}: " if FIRST_ERROR in os.environ else ""


def _is_first_process() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Context manager: ignore errors of printing after the reader of a pipe has ended, as `tee` does on Ctrl-C."""
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
    """Redirect a stream to /dev/null, because Python would report the broken pipe again when it exits."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def run(command: Callable[[], object]) -> None:
    """Run a command; a UserError becomes one line on stderr and exit code 2, a signal exit code 128 + its number."""
    _replace_closed_streams()
    with suppress(OSError):  # if the working directory was deleted, a later function reports it
        sys.path.append(os.getcwd())  # finds classes in the user's working directory
    silence_libraries()
    threading.excepthook = _thread_excepthook
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; another backend may not be installed
    try:
        with signals_handled(_stop, CLUSTER_SIGNALS):
            command()
        print(end="", flush=True)  # raises here if stdout is broken or full
    except Stopped:
        say("stopped")
        raise
    except (KeyboardInterrupt, SystemExit) as ended:
        # the Trainer turns Ctrl-C into exit code 1
        if not any(isinstance(cause, KeyboardInterrupt) for cause in exception_chain(ended)):
            raise
        say("stopped")
        sys.exit(130)
    except BrokenPipeError:  # as in `kvt generate | head`
        _discard_output(sys.stdout)
        sys.exit(1)
    except Exception as error:
        message = user_error(error)
        if not _is_first_to_fail():
            sys.exit(1 if message is None else 2)
        if message is None:
            module = getattr(error, "obj", None)
            if isinstance(error, ImportError):
                module = sys.modules.get((error.name or "").partition(".")[0])
            if isinstance(module, ModuleType):  # a user's file may hide a package of the same name
                place = getattr(module, "__file__", None) or getattr(module, "__path__", "Python")
                error.add_note(f"{module.__name__} was imported from {place}")
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
    """Print a thread's traceback, except for a resource limit, which TensorBoard's writer passes to the main thread."""
    if failed.exc_value is None or resource_limit_message(failed.exc_value) is None:
        threading.__excepthook__(failed)


def silence_libraries() -> None:
    """Silence Lightning's messages below warnings, and the warnings in `IGNORED_WARNINGS`."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # output that the user has requested by a flag
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)  # hides "experiment created"
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # hides "tables created"
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}")


def user_error(error: BaseException) -> str | None:
    """Return the message for the user if a mistake or a resource limit caused an exception, else None.

    The message is that of the deepest UserError in the chain, because parsers wrap the errors that they catch. Among
    errors of a parser itself, the outermost counts.
    """
    message = None
    for cause in exception_chain(error):
        if isinstance(cause, UserError) and not (message and isinstance(cause, _ParsingError)):
            message = str(cause)
        elif is_out_of_memory(cause):
            message = f"out of memory: choose a smaller model, batch or data set ({cause!s:.200})"
        elif isinstance(cause, ModuleNotFoundError) and cause.name in EXTRAS:
            message = f'a package is missing: pip install "kvt[{EXTRAS[cause.name]}]"'
        elif isinstance(cause, ModuleNotFoundError) and (remedy := re.search("`(pip install .*)`", str(cause))):
            message = f"a package is missing: {remedy[1]}"
        elif isinstance(cause, FileNotFoundError) and cause.filename is None:  # raised by os.getcwd
            message = "the working directory is gone: change to one that exists"
    return message or resource_limit_message(error)


class OneLineParser(ArgumentParser):
    """An argument parser, or a mixin for one, that raises a one-line UserError instead of printing its usage."""

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
            bare = flag.lstrip("-").rpartition(".")[2]  # lr for --model.lr
            names = [option[2:] for option in self._option_string_actions if option.startswith("--")]
            nearest = [name for name in names if bare.startswith(f"{name}_") or name.startswith(f"{bare}_")]
            # compared without "--": these two characters of every flag would make all flags look similar
            nearest += get_close_matches(bare, names, n=1, cutoff=0.75)
            message += f": did you mean --{nearest[0]}?" if nearest else ": see --help"
        raise _ParsingError(message) from ex


class _ParsingError(UserError):
    pass
