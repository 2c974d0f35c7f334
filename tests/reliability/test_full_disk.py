"""A disk that is full, at whatever moment: one line, nothing half written, nothing lost; with room the run goes on."""

import csv
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.checkpoints import read_checkpoint
from tests.conftest import CONFIGS, QUIET, SMALL_LISTS
from tests.reliability.sandbox import command, disk, leave, sandboxed

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "2"]
BENCH = ["--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--repeats", "2"]
RUNS = Path("lightning_logs/reverse/kv")


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def require_whole(folder: Path) -> None:
    """Everything below a folder is what its name says, in full; of what failed nothing is left."""
    for path in contents(folder):
        if path.suffix == ".ckpt":
            assert yaml.safe_load(read_checkpoint(path)["config"])["model"]
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text())
        elif path.suffix == ".csv":
            rows = [*csv.reader(path.read_text().splitlines())]
            assert len(rows) > 1
            assert all(len(row) == len(rows[0]) for row in rows)
        else:
            assert path.name == ".lock" or path.name.startswith("events."), path


def found(run: Path) -> dict[str, float]:
    """What a run has measured."""
    return {name: value for name, value in json.loads((run / "result.json").read_text()).items() if "/" in name}


def a_run(rooms: Sequence[tuple[int | None, int | None]]) -> None:
    """Runs on a disk with room for so many KiB and files, and again once there is room; the last room is enough."""
    disk(Path("disk"))
    os.chdir("disk")
    assert command(*RUN).code == 0
    earlier, expected = contents(RUNS), found(RUNS / "version_0")
    for number, room in enumerate(rooms, start=1):
        run = RUNS / f"version_{number}"
        leave(Path(), *room)
        ended = command(*RUN)
        assert contents(RUNS).items() >= earlier.items()
        require_whole(RUNS)
        leave(Path(), None, None)
        if room != rooms[-1]:
            line = ended.refused("No space left on device", "disk/lightning_logs" if not run.exists() else RUNS.name)
            assert run.exists() == (f"; then --resume {run} goes on" in line)
            ended = command(*(["fit", "--resume", str(run), *QUIET[:2]] if run.exists() else RUN))
        assert (ended.code, ended.err) == (0, "")
        require_whole(RUNS)
        assert found(run) == expected
        EventAccumulator(str(run)).Reload()
        earlier = contents(RUNS)


def test_a_run(in_tmp_dir):
    sandboxed(a_run, [(None, 1), (None, 10), (200, None), (None, None)])


@pytest.mark.slow
@pytest.mark.parametrize("rooms", [[(None, n) for n in range(13)], [(n, None) for n in (*range(0, 360, 30), 3000)]])
def test_a_run_at_every_moment(in_tmp_dir, rooms):
    sandboxed(a_run, rooms)


def others(trained: Path, words: Sequence[str], room: int, output: str) -> None:
    """A command that reads a checkpoint and writes a file."""
    disk(Path("disk"))
    shutil.copytree(trained, "disk/run")
    os.chdir("disk")
    words = [word.replace("CKPT", "run/checkpoints/best.ckpt") for word in words]
    before = contents(Path())
    leave(Path(), room, None)
    command(*words).refused("No space left on device", output)
    assert contents(Path()) == before
    leave(Path(), None, None)
    assert command(*words).code == 0
    earlier = contents(Path())
    assert output in map(str, earlier)
    leave(Path(), room, None)
    command(*words).refused("No space left on device", output)
    assert contents(Path()) == earlier


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run."""
    root = tmp_path_factory.mktemp("trained")
    assert command(*RUN, "--default_root_dir", str(root)).code == 0
    return root / RUNS / "version_0"


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["predict", "--ckpt_path", "CKPT", *QUIET], "run/predictions.csv"),
        (["maps", "--ckpt_path", "CKPT"], "maps.png"),
        (["maps", "--ckpt_path", "CKPT", "--out", "maps.svg"], "maps.svg"),
        (["maps", "--ckpt_path", "CKPT", "--out", "maps.pdf"], "maps.pdf"),
        (["bench", *BENCH], "bench.csv"),
        (["bench", *BENCH, "--plot"], "bench.png"),
    ],
)
@pytest.mark.parametrize("room", [0, 4])
def test_what_writes_a_file(in_tmp_dir, trained, words, output, room):
    sandboxed(others, trained, words, room, output)
