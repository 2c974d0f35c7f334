"""A small study, and processes that make it, to be killed or started two at a time."""

import csv
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml

from kvt.cli.main import main

TASKS = ["reverse", "sort"]
ATTENTIONS = ["qkv", "kv", "kv+pos"]
AXES = {
    "attn": ATTENTIONS,
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "train_size": 480,
    "val_size": 64,
    "test_size": 64,
    "batch_size": 16,
    "max_epochs": 2,
    "val_check_interval": 0.25,  # eight checkpoints
    "accelerator": "cpu",
}
RESULT = {
    **{"config": {}, "seed": 0, "parameters": 9, "seconds": 3.0, "precision": "32-true", "commit": None},
    **{"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:05+00:00", "packages": {"torch": "2"}},
    "machine": {"processor": "x", "system": "y", "threads": 1, "gpus": []},
}
METRICS = {"val/loss": 1.75, "val/acc": 0.5, "test/acc": 0.75}
HISTORY = "step,seconds,train/loss,val/loss,val/acc\n10,1.0,2.0,,\n20,2.0,1.5,1.75,0.5\n"
WORKERS = len(os.sched_getaffinity(0))
"""One a core: each run has one thread, wherever it runs."""


def write_run(folder: Path, result: Any = RESULT | METRICS, history: str = HISTORY) -> Path:
    """Write the files of a finished run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "history.csv").write_text(history)
    return folder


class Study:
    """A grid and a folder for its runs.

    Args:
        root: a folder.
        axes: of the grid, where they are not `AXES`.
    """

    def __init__(self, root: Path, **axes: Any) -> None:
        self.root, self.folder = root, root / "runs"
        (root / "grids").mkdir(parents=True, exist_ok=True)
        self.write_grid(**axes)

    def write_grid(self, tasks: Any = TASKS, **axes: Any) -> None:
        content = {"tasks": tasks, "axes": AXES | axes, "seeds": [0], "scales": {"laptop": None}}
        (self.root / "grids" / "small.yaml").write_text(yaml.safe_dump(content))

    def words(self, *flags: str) -> list[str]:
        return ["study", "run", "grids/small.yaml", "--folder", str(self.folder), "--workers", str(WORKERS), *flags]

    def start(self, *flags: str) -> "Driver":
        """Start a driver, forked from a process that has everything imported."""
        return Driver(self, flags)

    def run(self, *flags: str, code: int = 0) -> str:
        """What a driver prints that ends by itself; errors too."""
        driver = self.start(*flags)
        assert driver.join() == code, driver.printed
        assert "Traceback" not in driver.printed
        return driver.printed

    @property
    def finished(self) -> dict[str, bytes]:
        """The bytes and the inode of each result.json: neither may ever change."""
        files = sorted(self.folder.glob("*/*/*/result.json"))
        return {file.parent.name: file.read_bytes() + str(file.stat().st_ino).encode() for file in files}

    @property
    def checkpoints(self) -> set[tuple[Path, int]]:
        """The last checkpoints of unfinished runs, each with its time."""
        found = set()
        for file in self.folder.glob("*/*/*/checkpoints/last.ckpt"):
            with suppress(FileNotFoundError):  # finished by now
                found.add((file, file.stat().st_mtime_ns))
        return found

    def log(self, run: str) -> str:
        return (self.folder / ".logs" / f"{run}.txt").read_text()

    @property
    def results(self) -> dict[str, Any]:
        """The results of the runs by folder, without times."""
        files = sorted(self.folder.glob("*/*/*/result.json"))
        return {str(file.parent.relative_to(self.folder)): _result(file) for file in files}


class Driver:
    """`kvt study run` in another process."""

    def __init__(self, study: Study, flags: Sequence[str]) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["kvt.training.lightning_cli", "kvt.study.runner"])
        number = len([*study.root.glob("driver*.txt")])
        self._output = study.root / f"driver{number}.txt"
        self._output.touch()
        self.process: ForkServerProcess = context.Process(
            target=_drive, args=(study.words(*flags), study.root, self._output)
        )
        self.process.start()

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def join(self, seconds: float = 120) -> int | None:
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def workers(self) -> list[int]:
        """The processes that this and all other drivers have started."""
        return [pid for pid in children(forkserver._forkserver._forkserver_pid) if pid != self.process.pid]


def _drive(words: list[str], root: Path, output: Path) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.argv = ["kvt", *words]
    # uses the fork server that forked it, which has everything imported
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    main()


def _result(file: Path) -> Any:
    result = json.loads(file.read_text())
    kept = {name: value for name, value in result.items() if "/" in name or name in ("parameters", "seed", "diverged")}
    model, data = (result["config"][section]["init_args"] for section in ("model", "data"))
    with file.with_name("history.csv").open() as lines:
        history = [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(lines)]
    return kept, model, {**data, "data_dir": None}, history


def children(of: int) -> list[int]:
    """The living children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone by now
            continue
        if int(parent) == of and state != "Z":
            found.append(int(stat.parent.name))
    return found


def descendants(of: int) -> list[int]:
    """The living descendants of a process."""
    return [pid for child in children(of) for pid in (child, *descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for a condition."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "it did not happen"
        sleep(0.02)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # gone by now
        os.kill(pid, signal.SIGKILL)
