"""Odd things in the folder of a run, or in its name: one line, and nothing outside the folder is changed."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from kvt.cli.bench import bench
from kvt.cli.main import main, run_lightning
from kvt.cli.study import reproduce, study_report
from kvt.system.console import run
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL_LISTS, slow
from tests.study.test_command import TINY


@pytest.fixture
def killed(experiment) -> Path:
    """The folder of a run that can be resumed."""
    folder = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1")["path"].parent
    (folder / "result.json").unlink()
    return folder


def fit(*words: str) -> None:
    run(lambda: run_lightning(["fit", *words], test=True))


@pytest.mark.parametrize("name", ["result.json", *slow("history.csv", "checkpoints/best.ckpt")])
def test_a_folder_in_place_of_a_runs_file_is_found_before_training(mistake, killed, monkeypatch, name):
    (killed / name).unlink(missing_ok=True)
    (killed / name).mkdir()
    monkeypatch.setattr("kvt.tasks.ListTask.compute_metrics", None)  # training would fail
    assert Path(name).name in mistake(fit, "--resume", str(killed), *QUIET[:2])


def test_a_folder_in_place_of_a_file_of_another_loggers_run(mistake, in_tmp_dir, monkeypatch):
    Path("mine/v/result.json").mkdir(parents=True)
    monkeypatch.setattr("kvt.tasks.ListTask.compute_metrics", None)
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".", "--trainer.logger.name", "mine"]
    words = ["--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, *logger, "--trainer.logger.version", "v"]
    assert "mine/v/result.json" in mistake(fit, *words)


def test_a_folder_in_place_of_predictions(mistake, killed, kvt, monkeypatch):
    (killed / "predictions.csv").mkdir()
    monkeypatch.setattr("kvt.tasks.ListTask.forward", None)
    assert "predictions.csv" in mistake(kvt, "predict", "--ckpt_path", str(killed / "checkpoints" / "best.ckpt"))


def test_a_folder_in_place_of_a_table(mistake, in_tmp_dir, monkeypatch):
    Path("x.md").mkdir()
    monkeypatch.setattr("kvt.cli.bench.compare", None)
    assert "x.md" in mistake(lambda: run(lambda: bench(out="x")))


def test_a_folder_in_place_of_a_report(mistake, in_tmp_dir, monkeypatch):
    Path("experiments").symlink_to(REPOSITORY / "experiments")
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    for folder in ("own/report.md", "runs/reports/figure5-smoke/report.html", "runs/reports/table1.csv"):
        Path(folder).mkdir(parents=True)
    monkeypatch.setattr("kvt.study.runner.make_runs", None)
    report, again = {"scale": "all", "folder": "runs", "out": "own"}, {"scale": "smoke", "folder": "runs"}
    assert "report.md" in mistake(lambda: run(lambda: study_report("tiny.yaml", **report)))
    assert "report.html" in mistake(lambda: run(lambda: reproduce("figure5", **again)))
    Path("runs/reports/figure5-smoke/report.html").rmdir()
    assert "table1.csv" in mistake(lambda: run(lambda: reproduce("figure5", "table1", **again)))


@pytest.mark.parametrize("target", ["../../../../other", *slow("nowhere", ".lock", "folder")])
def test_a_lock_that_is_a_link_or_a_folder(mistake, killed, target):
    Path("other").write_text("mine")
    (killed / ".lock").unlink(missing_ok=True)
    if target == "folder":
        (killed / ".lock").mkdir()
    else:
        (killed / ".lock").symlink_to(target)
    assert ".lock" in mistake(fit, "--resume", str(killed), *QUIET[:2])
    assert Path("other").read_text() == "mine"
    assert not (killed / "nowhere").exists()


def test_temporary_files_of_a_killed_process_are_removed_in_the_run_alone(killed, in_tmp_dir):
    shutil.move(killed / "checkpoints", "elsewhere")
    (killed / "checkpoints").symlink_to(in_tmp_dir / "elsewhere")
    Path("elsewhere/theirs.tmp").touch()
    (killed / "result.json.1.tmp").touch()
    fit("--resume", str(killed), *QUIET[:2])
    assert Path("elsewhere/theirs.tmp").exists()
    assert not (killed / "result.json.1.tmp").exists()
    assert (killed / "result.json").exists()


def test_a_run_whose_path_has_a_newline(experiment, mistake, kvt, monkeypatch):
    flags = ["--max_epochs", "1", "--default_root_dir", "a\nb"]
    folder = experiment("reverse", *SMALL_LISTS, *flags)["path"].parent
    (folder / "result.json").unlink()
    fit("--resume", str(folder), *QUIET[:2])
    assert (folder / "result.json").exists()
    kvt("predict", "--ckpt_path", str(folder / "checkpoints" / "best.ckpt"))
    assert (folder / "predictions.csv").exists()
    assert "no folder of a run" in mistake(fit, "--resume", "no\nrun")
    monkeypatch.setattr(sys, "argv", ["kvt", "test", "--ckpt_path", "no\ncheckpoint"])
    assert "no checkpoint" in mistake(main)
