"""Folders that cannot be written: one line that names them, and what lies there stays as it is."""

import ctypes
import os
from pathlib import Path

import pytest

from kvt.study import runner as studies
from tests.conftest import CONFIGS, QUIET, SMALL_LISTS
from tests.helpers.drivers import Study
from tests.helpers.in_line import InLine
from tests.helpers.sandbox import LIBC, command, forked, read_only, sandboxed
from tests.training.test_full_disk import contents

pytestmark = pytest.mark.slow

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "1"]
FIRST = Path("lightning_logs/reverse/kv/version_0")


def powerless(path: Path) -> None:
    """Makes a folder, and those below it, one without permission to write; even root has none any more."""
    for folder in (path, *path.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o555)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # of capset(2), version 3
    assert LIBC.capset(header, nothing) == 0
    assert not os.access(path, os.W_OK)


@pytest.mark.parametrize(("within", "close"), [(sandboxed, read_only), (forked, powerless)])
def test_runs(in_tmp_dir, within, close):
    within(_runs, close)


def _runs(close) -> None:
    assert command(*RUN).code == 0
    (FIRST / "result.json").rename("result.json")  # as if it had been killed at its end
    before = contents(Path("lightning_logs"))
    close(Path("lightning_logs"))
    last = str(FIRST / "checkpoints" / "last.ckpt")
    for words in (
        RUN,
        ["fit", "--resume", str(FIRST), *QUIET[:2]],
        [*RUN, "--ckpt_path", last, "--max_epochs", "2"],
        ["predict", "--ckpt_path", last, *QUIET],
        ["maps", "--figure3", "--out", "figure.png"],
        ["maps", "--ckpt_path", last, "--out", "lightning_logs/maps.png"],
    ):
        command(*words).refused("lightning_logs")
        assert contents(Path("lightning_logs")) == before
    assert sorted(os.listdir()) == ["lightning_logs", "result.json"]
    assert command(*RUN, "--default_root_dir", "elsewhere").code == 0
    assert command("test", "--ckpt_path", last, *QUIET).code == 0
    assert contents(Path("lightning_logs")) == before


def test_a_folder_that_the_user_names(in_tmp_dir):
    sandboxed(_named)


def _named() -> None:
    Path("closed").mkdir()
    read_only(Path("closed"))
    command(*RUN, "--default_root_dir", "closed").refused("closed/lightning_logs", "--trainer.default_root_dir")
    command("bench", "--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--out", "closed/table").refused("--out")
    assert os.listdir() == ["closed"]


@pytest.mark.parametrize(("within", "close"), [(sandboxed, read_only), (forked, powerless)])
def test_a_study(in_tmp_dir, within, close):
    within(_study, close)


def _study(close) -> None:
    studies.LocalWorkers = lambda workers: InLine()
    small = {"max_epochs": 1, "train_size": 96, "tasks": ["sort"]}
    study = Study(Path("study").resolve(), attn=["kv"], **small)
    os.chdir(study.root)
    assert command(*study.words()).code == 0
    before = contents(study.folder)
    study.write_grid(attn=["qkv", "kv"], **small)
    report = ["study", "report", *study.words()[2:5]]
    close(study.folder)
    command(*study.words()).refused("--folder", str(study.folder), "name another")
    command(*report).refused("--folder", str(study.folder), "name another")
    assert "1 to run, 1 finished" in command(*study.words("--dry_run")).out
    assert command(*report, "--out", "report").code == 0
    assert contents(study.folder) == before
