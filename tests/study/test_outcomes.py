"""A run with damaged files or other settings has failed; it stops neither a study nor a report."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvt.commands import execute as command
from kvt.reports.report import write_report
from kvt.study import runner, workers
from kvt.study.grid import read_grid
from kvt.study.outcomes import State, read_outcome, read_outcomes
from kvt.study.runner import make_runs
from tests.helpers.drivers import CONFIG, HISTORY, METRICS, RESULT, finish, write_run
from tests.helpers.in_line import InLine
from tests.study.test_command import TINY


@pytest.fixture
def grid(in_tmp_dir):
    """A study of two finished runs."""
    (in_tmp_dir / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    grid = read_grid(Path("tiny.yaml"))
    for run in grid.runs:
        finish(run, Path("runs"))
    return grid


def test_a_run_of_version_0_1_is_read(grid):
    """Its files have settings of features that later versions removed."""
    run = grid.runs[0]
    folder, unused = run.folder(Path("runs")), {"teacher": None, "teacher_temperature": 1.0, "teacher_weight": 1.0}
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"config": result["config"] | unused}))
    (folder / "config.yaml").write_text(yaml.safe_dump(result["config"] | unused))
    assert read_outcomes(grid.runs, Path("runs"))[run.name][0].state == State.FINISHED
    assert read_outcome(folder, run.config).state == State.FINISHED


DAMAGE = [
    *(("result.json", content) for content in (b"", b"\x80\0\xff", b"[]", json.dumps(METRICS).encode())),
    ("history.csv", b""),
    ("history.csv", b"\x80\0\xff" * 99),
    ("history.csv", HISTORY.replace("1.75", "low").encode()),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE, ids=lambda value: repr(value)[-30:])
def test_damage_is_found_and_its_file_named(tmp_path, name, content):
    folder = write_run(tmp_path / "run")
    assert read_outcome(folder, CONFIG).state == State.FINISHED
    (folder / name).write_bytes(content)
    outcome = read_outcome(folder, CONFIG)
    assert outcome.state == State.FAILED
    assert outcome.message.startswith(name)
    assert not outcome.result


def test_a_result_may_hold_more_and_a_history_may_be_missing(tmp_path):
    more = {"test/acc": 1, "commit": "abc", "val/loss": float("nan"), "bleu": "sacrebleu"}
    folder = write_run(tmp_path / "run", RESULT | METRICS | more)
    assert read_outcome(folder, CONFIG).state == State.FINISHED
    (folder / "history.csv").unlink()
    assert read_outcome(folder, CONFIG).state == State.FINISHED
    write_run(folder, RESULT | {"diverged": "train/loss is nan"})
    assert read_outcome(folder, CONFIG)[:2] == (State.DIVERGED, "train/loss is nan")


@pytest.mark.usefixtures("undrawn")
def test_one_damaged_run_stops_neither_report_nor_dry_run(grid, capsys):
    folder = grid.runs[0].folder(Path("runs"))
    (folder / "history.csv").write_bytes(b"")
    command("study run", ["tiny.yaml", "--folder", "runs", "--dry_run"])
    out = capsys.readouterr().out
    assert out.startswith("2 runs: 1 finished, 1 failed")
    assert f"failed before, sort qkv seed=0, {folder}: history.csv" in out
    assert "sort  0 of 2 runs to do" in out
    write_report(grid, read_outcomes(grid.runs, Path("runs")), Path("report"))
    text = Path("report/report.md").read_text()
    assert "2 runs: 1 finished, 1 failed" in text
    failed = text.partition("## Failed\n")[2].partition("\n## ")[0]
    assert failed.count("* **sort QKV seed=0**: history.csv") == 1
    table = pd.read_csv("report/runs.csv")
    assert [*table.state] == ["failed", "finished"]
    assert [*table["test/acc"].isna()] == [True, False]


def test_a_damaged_run_is_made_again_only_with_retry_failed_and_from_the_beginning(grid, monkeypatch):
    root, made = Path("runs").resolve(), []
    folder = grid.runs[0].folder(root)
    (folder / "result.json").write_bytes(b"")
    (folder / "checkpoints").mkdir()

    def train(job):
        made.append([path.name for path in job.folder.iterdir()])
        finish(grid.runs[0], root)

    monkeypatch.setattr(workers, "train_job", train)
    monkeypatch.setattr(runner, "LocalWorkers", lambda *_: InLine())
    assert make_runs(grid.runs, root) == 1
    assert make_runs(grid.runs, root, retry_failed=True, listed=True) == 0
    assert read_outcome(folder, CONFIG).state == State.FAILED, "a list changes nothing"
    assert made == []
    assert make_runs(grid.runs, root, retry_failed=True) == 0
    assert made == [[".lock"]]


def test_a_run_made_when_a_default_was_another_is_told_and_kept(grid, capsys):
    """It is neither averaged in nor counted as done; a setting that did not exist had its default."""
    run, root = grid.runs[0], Path("runs")
    older = json.loads(json.dumps(run.config.as_dict()))
    del older["data"]["init_args"]["length"]
    write_run(run.folder(root), RESULT | METRICS | {"config": older})
    assert read_outcome(run.folder(root), run.config).state == State.FINISHED
    older["model"]["init_args"]["warmup"] = 7
    folder = write_run(run.folder(root), RESULT | METRICS | {"config": older})
    assert read_outcome(folder, run.config)[:2] == (State.FAILED, "warmup is 7, now 5")
    with pytest.raises(SystemExit):
        command("study run", ["tiny.yaml", "--folder", "runs"])
    out = capsys.readouterr().out
    assert out.startswith("2 runs: 1 finished, 1 failed")
    assert f"{folder}: warmup is 7, now 5; rerun with --retry_failed" in out
    assert (folder / "result.json").is_file()


def test_a_folder_copied_to_another_run_is_not_that_run(grid):
    """Whether it has ended, has begun or has failed: it is neither shown there nor resumed, and is made anew."""
    qkv, kv = (run.folder(Path("runs")) for run in grid.runs)
    for files in (("result.json", "history.csv"), ("config.yaml",), ("config.yaml", "error.txt")):
        shutil.rmtree(qkv)
        shutil.copytree(kv, qkv)
        (qkv / "config.yaml").write_text(yaml.safe_dump(grid.runs[1].config.as_dict()))
        (qkv / "error.txt").write_text("too wide")
        for path in [path for path in qkv.iterdir() if path.name not in files]:
            path.unlink()
        outcome = read_outcome(qkv, grid.runs[0].config)
        assert outcome[:2] == (State.FAILED, "attn is kv, now qkv")
        assert not outcome.result


@pytest.mark.parametrize("content", [b"", b"model: [", b"\x80", b"driver: mysql", None], ids=str)
def test_a_damaged_configuration_of_a_run_that_has_begun_is_named(tmp_path, content):
    """None is a folder in place of the file."""
    path = tmp_path / "config.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    outcome = read_outcome(tmp_path, CONFIG)
    assert outcome.state == State.FAILED
    assert outcome.message.startswith("config.yaml: ")
