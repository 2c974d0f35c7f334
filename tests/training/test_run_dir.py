"""Odd things in the folder of a run: one line, and nothing outside the folder is changed."""

import shutil
from pathlib import Path

import pytest

from kvt.cli.main import run_lightning
from kvt.system.console import run
from tests.conftest import QUIET, SMALL_LISTS, slow


@pytest.fixture
def killed(experiment) -> Path:
    """The folder of a run that can be resumed."""
    folder = experiment("reverse", *SMALL_LISTS, "--max_epochs", "1")["path"].parent
    (folder / "result.json").unlink()
    return folder


def fit(*words: str) -> None:
    run(lambda: run_lightning(["fit", *words], test=True))


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
