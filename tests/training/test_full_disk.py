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

from kvt.study import runner as studies
from kvt.training.load_checkpoint import read_checkpoint
from tests.conftest import CONFIGS, QUIET, SMALL, SMALL_LISTS
from tests.helpers.drivers import Study
from tests.helpers.in_line import InLine
from tests.helpers.sandbox import Ended, command, disk, leave, sandboxed

pytestmark = pytest.mark.slow

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "2"]
BENCH = ["--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--repeats", "2"]
CHECKPOINT = "run/checkpoints/best.ckpt"
RUNS = Path("lightning_logs/reverse/kv")


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def require_whole(folder: Path) -> None:
    """Everything below a folder is what its name says, in full; of what failed nothing is left."""
    for path in contents(folder):
        if path.suffix == ".ckpt":
            assert read_checkpoint(path)["model_class"]
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text())
        elif path.suffix == ".csv":
            rows = [*csv.reader(path.read_text().splitlines())]
            assert len(rows) > 1
            assert all(len(row) == len(rows[0]) for row in rows)
        else:
            assert path.suffix != ".tmp"


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
            line = ended.refused("No space left on device", RUNS.name)
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
@pytest.mark.parametrize(
    "rooms", [[(None, n) for n in range(0, 13, 2)], [(n, None) for n in (*range(0, 360, 60), 3000)]]
)
def test_a_run_at_every_moment(in_tmp_dir, rooms):
    sandboxed(a_run, rooms)


def a_file(trained: Path, words: Sequence[str], output: str, room: int) -> None:
    """A command that writes a file where there is none, and over one; the checkpoint that it reads is there."""
    disk(Path("disk"))
    shutil.copytree(trained, "disk/run")
    os.chdir("disk")
    for kibibytes in (room, 0):
        earlier = contents(Path())
        leave(Path(), kibibytes, None)
        command(*words).refused("No space left on device: make room there", Path(output).stem)
        assert contents(Path()).get(Path(output)) == earlier.get(Path(output))
        require_whole(Path())
        leave(Path(), None, None)
        assert command(*words).code == 0
        assert Path(output).stat().st_size > 0


def a_data_set(data: Path) -> None:
    """A run that keeps its decoded images on a disk without room."""
    disk(Path("data"))
    shutil.copytree(data / "mnist", "data/mnist")
    words = ["fit", "--config", str(CONFIGS / "mnist.yaml"), *QUIET, *SMALL["mnist"], "--data_dir", "data"]
    for room in ((None, 0), (0, None), (20, None)):
        leave(Path("data"), *room)
        command(*words).refused("cannot write in data/.cache (No space left on device)", "--data_dir")
        assert not [*Path("data").rglob("*.pt*")]
        assert not Path("lightning_logs").exists()
    leave(Path("data"), None, None)
    assert command(*words).code == 0


def test_a_data_set(in_tmp_dir, small_data):
    sandboxed(a_data_set, small_data)


def a_study() -> None:
    """A study and its report on a disk with more and more room."""
    studies.LocalWorkers = lambda workers: InLine()
    disk(Path("disk"))
    study = Study(Path("disk").resolve(), attn=["qkv", "kv"], max_epochs=1, train_size=96, tasks=["sort"])
    os.chdir(study.root)
    report = ["study", "report", *study.words()[2:5]]
    before = {}
    for room in ((None, 3), (150, None)):
        leave(Path(), *room)
        shown = command(*study.words())
        line = "\n".join(line for line in shown.err.splitlines() if line.strip() and "so far" not in line)
        Ended(shown.code, shown.out, line).refused("No space left on device")
        assert study.finished.items() >= before.items()
        require_whole(study.folder)
        before = study.finished
    leave(Path(), None, None)
    assert command(*study.words()).code == 0
    assert len(study.finished) == 2
    assert study.finished.items() >= before.items()
    for room in ((8, None), (None, 2)):
        leave(Path(), *room)
        command(*report).refused("No space left on device: make room there", "reports/small-laptop")
        require_whole(study.folder)
    leave(Path(), None, None)
    assert command(*report).code == 0


def test_a_study(in_tmp_dir):
    sandboxed(a_study)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run."""
    root = tmp_path_factory.mktemp("trained")
    assert command(*RUN, "--default_root_dir", str(root)).code == 0
    return root / RUNS / "version_0"


@pytest.mark.parametrize(
    ("words", "output", "room"),
    [
        (["predict", "--ckpt_path", CHECKPOINT, *QUIET], "run/predictions.csv", 0),
        (["maps", "--ckpt_path", CHECKPOINT], "maps.png", 8),
        (["maps", "--ckpt_path", CHECKPOINT, "--out", "maps.svg"], "maps.svg", 16),
        (["maps", "--ckpt_path", CHECKPOINT, "--out", "maps.pdf"], "maps.pdf", 4),
        (["bench", *BENCH], "bench.md", 4),
        (["bench", *BENCH, "--plot"], "bench.png", 12),
    ],
)
def test_what_writes_a_file(in_tmp_dir, trained, words, output, room):
    sandboxed(a_file, trained, words, output, room)
