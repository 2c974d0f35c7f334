"""What may stand in a run's folder, or be its name: one line, and nothing outside it is touched."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from kvt.cli.bench import bench
from kvt.cli.main import main, run_lightning
from kvt.cli.study import reproduce, study_report
from kvt.system.console import run
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL_LISTS
from tests.study.test_command import TINY

REVERSE = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "2"]


@pytest.fixture
def killed(experiment) -> Path:
    """The folder of a run that can be gone on with."""
    folder = experiment("reverse", *SMALL_LISTS, "--max_epochs", "2")["path"].parent
    (folder / "result.json").unlink()
    return folder


def fit(*words: str) -> None:
    run(lambda: run_lightning(["fit", *words], test=True))


@pytest.mark.parametrize("name", ["result.json", "history.csv", "checkpoints/best.ckpt"])
def test_a_folder_where_a_run_writes_a_file_is_found_before_it_trains(mistake, killed, monkeypatch, name):
    (killed / name).unlink(missing_ok=True)
    (killed / name).mkdir()
    monkeypatch.setattr("kvt.tasks.ListTask.compute_metrics", None)  # whoever comes to train fails
    line = mistake(fit, "--resume", str(killed), *QUIET[:2])
    assert Path(name).name in line


def test_a_folder_where_another_logger_has_its_run(mistake, in_tmp_dir, monkeypatch):
    Path("mine/v/result.json").mkdir(parents=True)
    monkeypatch.setattr("kvt.tasks.ListTask.compute_metrics", None)  # whoever comes to train fails
    logger = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".", "--trainer.logger.name", "mine"]
    line = mistake(lambda: run(lambda: CLI([*REVERSE, *logger, "--trainer.logger.version", "v"], test=True)))
    assert "mine/v/result.json" in line


def test_a_folder_where_predictions_are_written(mistake, killed, kvt, monkeypatch):
    (killed / "predictions.csv").mkdir()
    monkeypatch.setattr("kvt.tasks.ListTask.forward", None)
    assert "predictions.csv" in mistake(kvt, "predict", "--ckpt_path", str(killed / "checkpoints" / "best.ckpt"))


def test_a_folder_where_a_table_is_written(mistake, in_tmp_dir, monkeypatch):
    Path("x.md").mkdir()
    monkeypatch.setattr("kvt.cli.bench.compare", None)
    assert "x.md" in mistake(lambda: run(lambda: bench(out="x")))


@pytest.mark.parametrize("name", ["report.md", "report.html", "results.csv"])
def test_a_folder_where_a_report_is_written(mistake, in_tmp_dir, monkeypatch, name):
    Path("experiments").symlink_to(REPOSITORY / "experiments")
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    for folder in ("own", "runs/reports/tiny-all", "runs/reports/figure5-smoke"):
        (Path(folder) / name).mkdir(parents=True)
    monkeypatch.setattr("kvt.study.runner.make_runs", None)
    assert name in mistake(lambda: run(lambda: study_report("tiny.yaml", scale="all", folder="runs", out="own")))
    assert name in mistake(lambda: run(lambda: reproduce("figure5", scale="smoke", folder="runs")))


def test_a_folder_where_reproduce_writes_table_1(mistake, in_tmp_dir, monkeypatch):
    Path("experiments").symlink_to(REPOSITORY / "experiments")
    Path("runs/reports/table1.csv").mkdir(parents=True)
    monkeypatch.setattr("kvt.study.runner.make_runs", None)
    words = {"scale": "smoke", "folder": "runs"}
    assert "table1.csv" in mistake(lambda: run(lambda: reproduce("figure5", "table1", **words)))


@pytest.mark.parametrize("target", ["nowhere", ".lock", "../../../../other", "folder"])
def test_a_lock_that_is_none(mistake, killed, target):
    Path("other").write_text("mine")
    (killed / ".lock").unlink(missing_ok=True)
    if target == "folder":
        (killed / ".lock").mkdir()
    else:
        (killed / ".lock").symlink_to(target)
    assert ".lock" in mistake(fit, "--resume", str(killed), *QUIET[:2])
    assert Path("other").read_text() == "mine"
    assert not (killed / "nowhere").exists()


def test_what_a_killed_process_left_is_removed_in_the_run_alone(killed, in_tmp_dir):
    shutil.move(killed / "checkpoints", "elsewhere")
    (killed / "checkpoints").symlink_to(in_tmp_dir / "elsewhere")
    Path("elsewhere/theirs.tmp").touch()
    (killed / "result.json.1.tmp").touch()
    fit("--resume", str(killed), *QUIET[:2])
    assert Path("elsewhere/theirs.tmp").exists()
    assert not (killed / "result.json.1.tmp").exists()
    assert (killed / "result.json").exists()


def test_a_run_whose_path_has_a_newline(in_tmp_dir, capsys, mistake, kvt, monkeypatch):
    run(lambda: CLI([*REVERSE, "--default_root_dir", "a\nb"], test=True))
    folder = next(Path("a\nb").rglob("result.json")).parent
    (folder / "result.json").unlink()
    fit("--resume", str(folder), *QUIET[:2])
    assert (folder / "result.json").exists()
    kvt("predict", "--ckpt_path", str(folder / "checkpoints" / "best.ckpt"))
    assert (folder / "predictions.csv").exists()
    assert "no folder of a run" in mistake(fit, "--resume", "no\nrun")
    monkeypatch.setattr(sys, "argv", ["kvt", "test", "--ckpt_path", "no\ncheckpoint"])
    assert "no checkpoint" in mistake(main)
