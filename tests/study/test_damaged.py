"""A damaged run is one line of a report, and of a dry run, and stops neither."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvt.cli.main import execute as command
from kvt.reports.report import write_report
from kvt.study import run as work
from kvt.study import runner as study
from kvt.study.grid import read_grid
from kvt.study.run import State, outcome_of, record_of
from kvt.study.runner import make_runs
from tests.conftest import REPOSITORY
from tests.helpers.drivers import RESULT
from tests.helpers.in_line import InLine
from tests.study.test_command import TINY

METRICS = {"val/acc": 0.5, "test/acc": 0.75}
HISTORY = "step,seconds,train/loss,val/loss\n10,1.0,2.0,\n20,2.0,1.5,1.75\n"


@pytest.fixture
def grid(in_tmp_dir):
    """A study of two runs that have finished, as far as their files say."""
    (in_tmp_dir / "experiments").symlink_to(REPOSITORY / "experiments")
    (in_tmp_dir / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    grid = read_grid(Path("tiny.yaml"))
    for run in grid.runs:
        leave(run.folder(Path("runs")))
    return grid


def leave(folder: Path, result=RESULT | METRICS, history: str = HISTORY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "history.csv").write_text(history)
    return folder


DAMAGE = {
    "result.json: empty": ("result.json", b"", "result.json cannot be read"),
    "result.json: binary": ("result.json", b"\x80\0\xff", "result.json cannot be read"),
    "result.json: deep": ("result.json", b"[" * 100_000, "result.json cannot be read"),
    "result.json: a list": ("result.json", b"[]", "result.json cannot be read"),
    "history.csv: empty": ("history.csv", b"", "history.csv cannot be read"),
    "history.csv: binary": ("history.csv", b"\x80\0\xff" * 99, "history.csv cannot be read"),
    "history.csv: words": ("history.csv", HISTORY.replace("1.5", "low").encode(), "history.csv cannot be read"),
    "history.csv: header alone": ("history.csv", HISTORY.split("\n")[0].encode(), "history.csv has no steps"),
    "history.csv: no steps": ("history.csv", HISTORY.replace("step", "stop").encode(), "history.csv has no steps"),
    "history.csv: no time": ("history.csv", HISTORY.replace("1.0", "").encode(), "history.csv has steps without"),
    **{
        f"{name} {value}": (
            "result.json",
            json.dumps(RESULT | METRICS | {name: value}).encode(),
            f"result.json: {name}",
        )
        for name, value in [
            *[("seconds", "3"), ("seconds", True), ("parameters", None), ("parameters", 10**30), ("machine", [])],
            *[("precision", 32), ("packages", "torch"), ("commit", 1), ("test/acc", "0.75"), ("val/acc", [0.5])],
            *[("fleet", "2"), ("diverged", 1), ("config", None), ("started", 0)],
        ]
    },
    **{
        f"{name} {value!r}": ("result.json", json.dumps(RESULT | {name: value}).encode(), message)
        for name, value, message in [
            ("seconds", -1.0, "its seconds are not those of a run"),
            ("seconds", float("nan"), "its seconds are not those of a run"),
            ("seconds", 1e300, "its seconds are not those of a run"),
            ("finished", "9999-01-01T00:00:00+00:00", "its seconds are not those of a run"),
            ("started", "yesterday", "no two times"),
            ("started", "2026-01-01T00:00:00", "no two times"),
            ("machine", RESULT["machine"] | {"threads": "two"}, "threads"),
            ("machine", RESULT["machine"] | {"gpus": [1]}, "gpus"),
            ("machine", {}, "lacks processor"),
        ]
    },
    **{
        f"without {name}": (
            "result.json",
            json.dumps({k: v for k, v in RESULT.items() if k != name}).encode(),
            f"result.json lacks {name}",
        )
        for name in RESULT
    },
}


@pytest.mark.parametrize(("name", "content", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_said(tmp_path, name, content, message):
    folder = leave(tmp_path / "run")
    assert record_of(folder).state == State.FINISHED
    (folder / name).write_bytes(content)
    record = record_of(folder)
    assert record.state == State.DAMAGED
    assert message in record.message
    assert record.result is None


@pytest.mark.parametrize(
    "changes", [{}, {"fleet": None}, {"commit": "1a2b"}, {"test/ppl": float("inf")}, {"notes": {}}]
)
def test_what_a_run_may_write_is_no_damage(tmp_path, changes):
    assert record_of(leave(tmp_path / "run", RESULT | METRICS | changes)).state == State.FINISHED
    assert record_of(leave(tmp_path / "run", RESULT | {"diverged": "train/loss is nan"})).state == State.DIVERGED
    (tmp_path / "run" / "history.csv").unlink()
    assert record_of(tmp_path / "run").state == State.DIVERGED


@pytest.mark.parametrize("name", ["result.json", "history.csv"])
def test_one_damaged_run_stops_neither_report_nor_dry_run(grid, capsys, name):
    damaged = grid.runs[0]
    (damaged.folder(Path("runs")) / name).write_bytes(b"")
    command("study run", ["tiny.yaml", "--folder", "runs", "--dry_run"])
    out = capsys.readouterr().out
    assert out.startswith("2 runs: 1 finished, 1 damaged")
    assert f"damaged before, sort qkv seed=0: {name} cannot be read" in out
    assert [line.split()[:7] for line in out.splitlines() if line.startswith("sort ")] == [
        ["sort", "2", "1", "0", "0", "1", "0"]
    ]
    written = write_report(grid, Path("runs"), Path("report"), margin=1)
    text = written.markdown.read_text()
    assert "2 runs: 1 finished, 1 damaged" in text
    damaged = text.partition("## Damaged\n")[2].partition("\n## ")[0]
    assert damaged.count("* **sort qkv") == 1
    assert f"{name} cannot be read" in damaged.replace("\\", "")
    table = pd.read_csv(written.csv)
    assert [*table.state] == ["damaged", "finished"]
    assert [*table["test/acc"].isna()] == [True, False]


def test_a_damaged_run_is_made_again_only_where_that_is_asked_for(grid, monkeypatch, capsys):
    damaged = grid.runs[0]
    root = Path("runs").resolve()
    (damaged.folder(root) / "result.json").write_bytes(b"")
    made = []

    def train(job):
        made.append(job.folder.name)
        leave(job.folder)
        return outcome_of(job)

    monkeypatch.setattr(work, "_train", train)
    monkeypatch.setattr(study, "_engine", lambda *args: InLine())
    assert make_runs(grid.runs, root, 1, None, retry_failed=False, dry_run=False, listed=False) == 1
    assert made == []
    assert make_runs(grid.runs, root, 1, None, retry_failed=True, dry_run=True, listed=False) == 0
    assert record_of(damaged.folder(root)).state == State.DAMAGED, "a dry run changes nothing"
    assert make_runs(grid.runs, root, 1, None, retry_failed=True, dry_run=False, listed=False) == 0
    assert made == [damaged.name]
