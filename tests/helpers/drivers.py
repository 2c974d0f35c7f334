"""A small study, and processes that run it, to be killed or started two at a time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml

from kvt.commands import main
from kvt.run.folder import locked
from kvt.study.grid import Run, TaskFile
from kvt.system import CONFIGS
from tests.helpers.runs import read_history

AXES = {
    **{"attn": ["qkv", "kv", "kv+pos"], "dim": 16, "depth": 1, "heads": 2, "accelerator": "cpu"},
    **{"train_size": 480, "val_size": 64, "test_size": 64, "batch_size": 16, "max_epochs": 2},
    "val_check_interval": 0.25,  # eight checkpoints
}
CONFIG = TaskFile(CONFIGS / "sort.yaml").config({}, seed=0)
RESULT = {
    **{"config": CONFIG.as_dict(), "seed": 0, "parameters": 9, "seconds": 3.0, "precision": "32-true", "commit": None},
    **{"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:05+00:00", "packages": {"torch": "2"}},
    "machine": {"processor": "x", "system": "y", "threads": 1, "gpus": []},
}
METRICS = {"val/loss": 1.75, "val/acc": 0.5, "test/acc": 0.75}
HISTORY = "step,seconds,train/loss,val/loss,val/acc\n10,1.0,2.0,,\n20,2.0,1.5,1.75,0.5\n"
WORKERS = len(os.sched_getaffinity(0))  # each run has one thread


def write_run(folder: Path, result: Any = RESULT | METRICS, history: str = HISTORY) -> Path:
    """Write the files of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "history.csv").write_text(history)
    return folder


def finish(run: Run, root: Path, result: Any = RESULT | METRICS, history: str = HISTORY) -> Path:
    """Write the files of a finished run of a grid."""
    return write_run(run.folder(root), result | {"config": run.config.as_dict()}, history)


class Study:
    """A grid, with `axes` in place of some of `AXES`, and a folder for its runs."""

    def __init__(self, root: Path, **axes: Any) -> None:
        self.root, self.folder = root, root / "runs"
        (root / "grids").mkdir(parents=True, exist_ok=True)
        self.write_grid(**axes)

    def write_grid(self, tasks: Any = ("reverse", "sort"), **axes: Any) -> None:
        content = {"tasks": tasks, "axes": AXES | axes, "seeds": [0], "scales": {"laptop": None}}
        (self.root / "grids" / "small.yaml").write_text(yaml.safe_dump(content))

    def words(self, *flags: str) -> list[str]:
        return ["study", "run", "grids/small.yaml", "--folder", str(self.folder), "--workers", str(WORKERS), *flags]

    def start(self, *flags: str) -> "Driver":
        return Driver(self, flags)

    def run(self, *flags: str, code: int = 0) -> str:
        """Return what a driver prints, errors too, that ends with this exit code."""
        driver = self.start(*flags)
        assert driver.join() == code, driver.printed
        assert "Traceback" not in driver.printed
        return driver.printed

    result_files = property(lambda self: sorted(self.folder.glob("*/*/*/result.json")))

    @property
    def finished(self) -> dict[str, bytes]:
        """The bytes and the inode of each result.json: neither may ever change."""
        return {path.parent.name: path.read_bytes() + b"%d" % path.stat().st_ino for path in self.result_files}

    @property
    def checkpoints(self) -> set[tuple[Path, int]]:
        """The last checkpoints of unfinished runs, each with its time."""
        found = set()
        for file in self.folder.glob("*/*/*/checkpoints/last.ckpt"):
            with suppress(FileNotFoundError):  # the run has just finished
                found.add((file, file.stat().st_mtime_ns))
        return found

    def log(self, run: str) -> str:
        return (self.folder / ".logs" / f"{run}.txt").read_text()

    @property
    def results(self) -> dict[str, Any]:
        """The results of the runs by folder, without times."""
        return {str(file.parent.relative_to(self.folder)): _result(file) for file in self.result_files}


class Driver:
    """`kvt study run` in a process that is forked from one that has everything imported."""

    def __init__(self, study: Study, flags: Sequence[str]) -> None:
        self._output = study.root / f"driver{len([*study.root.glob('driver*.txt')])}.txt"
        self._output.touch()
        context = fork_server()
        forkserver.ensure_running()
        key = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # Python 3.14 and later ask for it
        self.process = context.Process(target=_drive, args=(study.words(*flags), study.root, self._output, key))
        self.process.start()
        self.server = _state_and_parent(self.process.pid)[1]

    printed = property(lambda self: self._output.read_text())

    def join(self, seconds: float = 400) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def workers(self) -> list[int]:
        """The processes that this and all other drivers have started."""
        return [pid for pid in children(self.server) if pid != self.process.pid]


def _drive(words: list[str], root: Path, output: Path, key: bytes | None) -> None:
    redirect_output(output)
    os.chdir(root)
    sys.argv = ["kvt", *words]
    # its workers come from the same fork server, which has everything imported
    forkserver._forkserver._forkserver_authkey = key
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    main()


def _result(file: Path) -> Any:
    result = json.loads(file.read_text())
    kept = {name: value for name, value in result.items() if "/" in name or name in ("parameters", "seed", "diverged")}
    model, data = (result["config"][section]["init_args"] for section in ("model", "data"))
    return kept, model, {**data, "data_dir": None}, read_history(file.parent)


def hold(folder: Path) -> Callable[[], None]:
    """Let another process lock a run's folder until the function that is returned is called."""
    fork = get_context("fork")
    held, over = fork.Event(), fork.Event()

    def work() -> None:
        with locked(folder):
            held.set()
            over.wait()

    other = fork.Process(target=work, daemon=True)
    other.start()
    held.wait()

    def end() -> None:
        over.set()
        other.join()

    return end


def fork_server() -> Any:
    """Return a context whose processes are forked from one that has everything imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvt.run.fit", "kvt.study.runner", "tests.helpers.commands"])
    return context


def redirect_output(path: Path) -> None:
    """Append what this process prints to a file."""
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:  # it has ended
        return "Z", 0
    return state, int(parent)


def alive(pid: int) -> bool:
    return _state_and_parent(pid)[0] != "Z"


def children(of: int) -> list[int]:
    """Return the living children of a process."""
    found = {int(path.name): _state_and_parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return [pid for pid, (state, parent) in found.items() if parent == of and state != "Z"]


def descendants(of: int) -> list[int]:
    return [pid for child in children(of) for pid in (child, *descendants(child))]


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "it did not happen"
        sleep(0.02)


def wait_for_training(process: subprocess.Popen[str]) -> Path:
    """Wait until the run that a process trains below the working directory has a checkpoint; return its folder."""
    while process.poll() is None:
        if found := next(Path().rglob("last.ckpt"), None):
            return found.parent.parent
        sleep(0.1)
    raise AssertionError(process.communicate())


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)
