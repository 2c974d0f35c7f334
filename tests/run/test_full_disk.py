"""A disk that is full, at any moment: one line, nothing half written, nothing lost; with room the run goes on."""

import csv
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvt.data import tokens
from kvt.run.checkpoint_files import read_checkpoint
from tests.conftest import CONFIGS, QUIET, SMALL_LISTS, TINY
from tests.helpers.runs import contents, read_result
from tests.helpers.sandbox import command, disk, leave, sandboxed

pytestmark = pytest.mark.slow

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "2"]
BENCH = ["bench", "--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--repeats", "2"]
CHECKPOINT = "run/checkpoints/best.ckpt"
RUNS = Path("lightning_logs/reverse/kv")


def require_whole(folder: Path) -> None:
    """Make sure that every file below a folder is complete, and no temporary file is left."""
    for path in contents(folder):
        assert path.suffix != ".tmp"
        if path.suffix == ".ckpt":
            read_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text())
        elif path.suffix == ".csv":
            header, *rows = csv.reader(path.read_text().splitlines())
            assert rows
            assert all(len(row) == len(header) for row in rows)


@pytest.mark.parametrize(
    "rooms",
    [[(None, n) for n in range(0, 13, 2)], [(n, None) for n in (*range(0, 360, 60), 3000)]],
    ids=["files", "KiB"],
)
def test_a_run_at_every_moment(in_tmp_dir, rooms):
    sandboxed(_run, rooms)


def _run(rooms: Sequence[tuple[int | None, int | None]]) -> None:
    """Make runs on a disk with room for that many KiB and files, and again with room; the last room is enough."""
    disk(Path("disk"))
    os.chdir("disk")
    assert command(*RUN).code == 0
    earlier, expected = contents(RUNS), read_result(RUNS / "version_0")
    for number, room in enumerate(rooms, start=1):
        run = RUNS / f"version_{number}"
        leave(Path(), *room)
        ended = command(*RUN)
        assert contents(RUNS).items() >= earlier.items()
        require_whole(RUNS)
        leave(Path(), None, None)
        if room != rooms[-1]:
            line = ended.refused("No space left on device", RUNS.name)
            assert run.exists() == (f", then resume with --resume {run}" in line)
            ended = command(*(["fit", "--resume", str(run), *QUIET[:2]] if run.exists() else RUN))
        assert (ended.code, ended.err) == (0, "")
        require_whole(RUNS)
        assert read_result(run) == expected
        EventAccumulator(str(run)).Reload()
        earlier = contents(RUNS)


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
        *((["maps", "--ckpt_path", CHECKPOINT, "--out", out], out, 8) for out in ("maps.png", "maps.svg", "maps.html")),
        (BENCH, "bench.md", 4),
        ([*BENCH, "--plot"], "bench.png", 12),
    ],
)
def test_what_writes_a_file(in_tmp_dir, trained, words, output, room):
    sandboxed(_file, trained, words, output, room)


def _file(trained: Path, words: Sequence[str], output: str, room: int) -> None:
    """Run a command that writes a file where there is none, and over one."""
    disk(Path("disk"))
    shutil.copytree(trained, "disk/run")
    os.chdir("disk")
    for kibibytes in (room, 0):
        earlier = contents(Path())
        leave(Path(), kibibytes, None)
        command(*words).refused("No space left on device: free disk space", Path(output).stem)
        assert contents(Path()).get(Path(output)) == earlier.get(Path(output))
        require_whole(Path())
        leave(Path(), None, None)
        assert command(*words).code == 0
        assert Path(output).stat().st_size > 0


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_what_makes_tokens_of_a_text(in_tmp_dir, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    sandboxed(_tokens, tokenizer)


def _tokens(tokenizer: str) -> None:
    """Make tokens on a disk with ever more room; the same command goes on each time."""
    disk(Path("data"))
    Path("data/text.txt").write_text("".join(f"{number} is a number.\n" for number in range(20_000)))
    tokens.PIECE = 2**16
    words = ["fit", "--config", str(CONFIGS / "language_model.yaml"), *QUIET]
    words += ["--text", "data/text.txt", "--data_dir", "data"]
    words += ["--tokenizer", tokenizer, "--vocab_size", "300", "--fast_dev_run", "true", *TINY]
    for kibibytes in (0, 4, 40, 150):
        leave(Path("data"), kibibytes, None)
        command(*words).refused("No space left on device")
        require_whole(Path("data"))
    leave(Path("data"), None, None)
    assert command(*words).code == 0
    require_whole(Path("data"))
    assert not list(Path("data").rglob("*.part"))
