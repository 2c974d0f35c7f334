"""What stands around every command: quick imports, little noise, a user's mistake in one line."""

import atexit
import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from kvt.system.errors import UserError, exception_chain, is_out_of_memory, resource_limit_message

MAX_ERROR_CHARS = 800
"""Letters of an error: what a user has given may be a whole book."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports in here run without the garbage collector, and what they made is left out of its later rounds.

    torch and Lightning make 800,000 objects that all stay. The collector would walk through them again and again as
    they get more, which takes a quarter of the time, and find nothing.
    """
    _working_directory()  # without one, importing torch ends the process
    first, enabled = gc.get_freeze_count() == 0, gc.isenabled()
    gc.disable()
    try:
        with exit_on_ctrl_c():
            yield
    finally:
        if first:  # later there may be garbage about
            gc.freeze()
            atexit.register(gc.unfreeze)  # or else nanobind, in triton, believes that it leaks
        if enabled:
            gc.enable()
        _quiet()  # which Lightning, as it is imported, makes loud again


def exit_on_ctrl_c() -> AbstractContextManager[None]:
    """Context manager: Ctrl-C ends the process at once; some imported packages would catch it and go on."""
    return ctrl_c_handler(_end)


@contextmanager
def ctrl_c_handler(handler: Any) -> Iterator[None]:
    """Context manager: Ctrl-C has this handler, in the main thread and unless the process ignores Ctrl-C already.

    Args:
        handler: as of `signal.signal`. Where it is SIG_IGN, processes that are started meanwhile inherit it.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: object) -> None:
    say("stopped")
    os._exit(128 + number)


def say(words: str) -> None:
    """Writes a line to stderr, if anybody reads it, even in the middle of another one; the first process speaks."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{words}\n".encode())


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """What is said in here may go unheard: in `2>&1 | tee log`, Ctrl-C ends the reader before the run has saved."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is not None:
                stack.enter_context(redirect(_Outliving(stream)))
        yield


class _Outliving:
    """A stream whose reader may go."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._perhaps_unread():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._perhaps_unread():
            self._stream.flush()

    @contextmanager
    def _perhaps_unread(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            _unread(self._stream.fileno())


def _unread(descriptor: int) -> None:
    """What is written there from now on, and at the end of the process, is lost without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def run(command: Callable[[], object]) -> None:
    """Runs a command; a user's mistake becomes one line on stderr and exit code 2.

    Every other exception keeps its traceback: it is a bug of ours, or of the user's own class.
    """
    sys.path.append(_working_directory())  # attentions in the user's own folder
    _quiet()
    threading.excepthook = _in_a_thread
    with suppress(AttributeError):  # what a test has in its place, or nothing
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # not every terminal has an ä
    try:
        command()
        print(end="", flush=True)  # nothing, where there is no standard output
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as ended:
        # what the Trainer makes of Ctrl-C
        if ended.code == 1 and any(isinstance(cause, KeyboardInterrupt) for cause in exception_chain(ended)):
            _interrupted()
        raise
    except BrokenPipeError:  # as in `kvt generate | head`: nobody reads on
        _unread(sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {one_line(mistake)}", file=sys.stderr)
        sys.exit(2)


def _working_directory() -> str:
    """The folder that the command was started in; where it is gone, that is the end."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        print("error: the working directory is gone: cd into one that is there", file=sys.stderr)
        sys.exit(2)


def _in_a_thread(failed: threading.ExceptHookArgs) -> None:
    """Leaves what the machine refused to a thread to whoever waits for it: TensorBoard's hands it on."""
    if failed.exc_value is None or resource_limit_message(failed.exc_value) is None:
        threading.__excepthook__(failed)


def _interrupted() -> NoReturn:
    say("stopped")
    sys.exit(130)


def _quiet() -> None:
    """Keeps what Lightning says to its developers from its users."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # what was asked for by a flag
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for message in (
        "LeafSpec",  # deprecated in torch
        "smaller than the logging interval",  # the end of an epoch is logged too
        "callbacks used to create the checkpoint",  # a test has none of fit's
        "exists and is not empty",  # a run goes on in its own folder
        "missing from font",  # a symbol that a picture can only show as a box
        "dataloader is not resumable",  # each loader of a fleet knows where it stands
        "batching rule",  # the processor's fused attention takes the members of a fleet one by one
        "sync_dist=True",  # the means are synchronised before they are logged
    ):
        warnings.filterwarnings("ignore", message=f".*{message}")


def user_error(error: BaseException) -> str | None:
    """The message of the deepest `UserError` behind an exception, for parsers wrap what they catch.

    Of a parser's own it is the outermost, which says where the others were met.
    """
    found = None
    for cause in exception_chain(error):
        if isinstance(cause, UserError) and not (found and isinstance(cause, _ParsingError)):
            found = str(cause)
        elif is_out_of_memory(cause):
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            found = f"out of memory: choose a smaller model, batch or data set ({reason:.100})"
        elif isinstance(cause, ModuleNotFoundError) and (remedy := re.search("`(pip install .*)`", str(cause))):
            found = f"what was asked for needs a package that is not here: {remedy[1]}"
    return found or resource_limit_message(error)


def one_line(message: str) -> str:
    r"""A message fit for a terminal: in one line, cut in the middle where it is long, without control characters.

    >>> one_line("no\n such\tfile: \x1b[2J")
    'no such file: \\x1b[2J'
    """
    shown = printable(" ".join(message.split()))
    return (
        shown
        if len(shown) <= MAX_ERROR_CHARS
        else f"{shown[: MAX_ERROR_CHARS // 2]} … {shown[-MAX_ERROR_CHARS // 2 :]}"
    )


def printable(text: str) -> str:
    r"""A text fit for a terminal: control characters spelled out, but for ends of lines and tabs.

    >>> printable("to\tbe\n\x1b[2J")
    'to\tbe\n\\x1b[2J'
    """
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


class OneLineErrors:
    """For a parser: a user's mistake is raised, instead of printing usage and leaving."""

    def known_flags(self) -> Iterable[str]:
        """Bare names, the nearest of which is proposed in place of an unknown one."""
        return ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """The mistake as one line, for `run` to print."""
        raise _ParsingError(readable(message, self.known_flags())) from ex


class _ParsingError(UserError):
    """What a parser cannot make sense of."""


def readable(message: str, known_flags: Iterable[str] = ()) -> str:
    r"""A parser's paragraph in one line: which flag, what it was given, what it takes.

    >>> readable("Parser key \"trainer.max_epochs\":\n  Expected a <class 'int'>. Got value: x")
    '--trainer.max_epochs x: expected int'
    """
    if "arguments are required: ckpt_path" in message:
        return "--ckpt_path is missing: give a file under a run's checkpoints/"
    if re.search(r"(arguments are required: \w+\.|Key '?)(model|data)\b", message):
        return "--config is missing: give a task's YAML, such as --config experiments/configs/cifar10.yaml"
    if unaccepted := re.search(r"[Oo]ption '([\w.]+)'(?: is not accepted)?$", message.strip()):
        return f"unknown setting {unaccepted[1]!r}: {nearest(unaccepted[1].rpartition('.')[2], known_flags)}"
    if stray := re.match(r"unrecognized arguments: (--?[\w.-]*)", message):
        name = stray[1].lstrip("-").partition(".")[0]
        return f"unknown flag {stray[1]}: {nearest(name, known_flags)}"
    key = re.match(r'Parser key "([\w.]+)"(?: element \d+)?:', message)
    if not key:
        return message
    given = re.search(r"(?:Given|Got) value: (.*)", message)
    if not given:
        return f"--{key[1]}: {message[key.end() :]}"
    inside = re.match(r"NestedArg\(key='(.*?)'", given[1])
    named = f"--{key[1]}.{inside[1]}" if inside else f"--{key[1]} {given[1]:.200}"
    reasons = re.findall(r"^ {2,4}- ((?!Expected|Not a valid|Does not).+(?:\n {8}.+)*)", message, re.MULTILINE)
    if reasons:  # for each type that it may have; those of its other types are not meant
        return f"{named}: {'; '.join(dict.fromkeys(reasons))}"
    if inside:
        return f"{named}: --{key[1]} takes a value, nothing behind a dot"
    kinds = re.findall(r"Expected an? (?!path but|dot import)(.+?)(?:\. Got value.*)?$", message, re.MULTILINE)
    plain = [re.sub(r"<class '(?:.*\.)?(\w+)'>|typing\.Literal\[(.*)\]", r"\1\2", kind) for kind in kinds]
    wanted = [kind for kind in dict.fromkeys(plain) if kind != "NoneType"]
    return f"{named}: expected {' or '.join(wanted) or 'class_path and init_args of a known class'}"


def nearest(name: str, known_flags: Iterable[str]) -> str:
    """What to do about a flag that nothing takes.

    >>> nearest("max_epoch", ["max_steps", "max_epochs"])
    'did you mean --max_epochs?'
    """
    others = [flag for flag in known_flags if flag != name]
    found = get_close_matches(name, others, n=1)
    return f"did you mean --{found[0]}?" if found else "see --help"
