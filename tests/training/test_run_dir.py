"""Odd things in the folder of a run: one line, and nothing outside the folder is changed."""

import shutil
from pathlib import Path

import pytest

from kvt.cli.main import run_lightning
from kvt.system.console import run
from tests.conftest import QUIET, SMALL_LISTS


@pytest.fixture
def killed(experiment) -> Path:
    """The folder of a run that can be resumed."""
    folder = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1")["path"].parent
    (folder / "result.json").unlink()
    return folder


def fit(*words: str) -> None:
    run(lambda: run_lightning(["fit", *words], test=True))


def test_temporary_files_of_a_killed_process_are_removed_in_the_run_alone(killed, in_tmp_dir):
    shutil.move(killed / "checkpoints", "elsewhere")
    (killed / "checkpoints").symlink_to(in_tmp_dir / "elsewhere")
    Path("elsewhere/theirs.tmp").touch()
    (killed / "result.json.1.tmp").touch()
    fit("--resume", str(killed), *QUIET[:2])
    assert Path("elsewhere/theirs.tmp").exists()
    assert not (killed / "result.json.1.tmp").exists()
    assert (killed / "result.json").exists()
