"""Folders that cannot be written: one line that names them, and their files stay as they are."""

import ctypes
import os
from pathlib import Path

import pytest

from kvt.study import runner
from tests.conftest import CONFIGS, QUIET, SMALL_LISTS
from tests.helpers.drivers import Study
from tests.helpers.in_line import InLine
from tests.helpers.runs import contents
from tests.helpers.sandbox import LIBC, command, forked, read_only, sandboxed

pytestmark = pytest.mark.slow

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "1"]
FIRST = Path("lightning_logs/reverse/kv/version_0")


def forbid(path: Path) -> None:
    """Take away the permission to write in a folder and those below it, from root, too."""
    for folder in (path, *path.rglob("*")):
        if folder.is_dir():
            folder.chmod(0o555)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # of capset(2), version 3
    assert LIBC.capset(header, nothing) == 0
    assert not os.access(path, os.W_OK)


def test_runs(in_tmp_dir):
    forked(_runs)


def _runs() -> None:
    assert command(*RUN).code == 0
    (FIRST / "result.json").rename("result.json")  # as if it had been killed at its end
    before = contents(Path("lightning_logs"))
    forbid(Path("lightning_logs"))
    last = str(FIRST / "checkpoints" / "last.ckpt")
    for words in (
        RUN,
        ["fit", "--resume", str(FIRST), *QUIET[:2]],
        [*RUN, "--ckpt_path", last, "--max_epochs", "2"],
        ["predict", "--ckpt_path", last, *QUIET],
        ["maps", "--ckpt_path", last, "--out", "lightning_logs/maps.png"],
    ):
        command(*words).refused("lightning_logs")
    assert sorted(os.listdir()) == ["lightning_logs", "result.json"]
    assert command(*RUN, "--default_root_dir", "elsewhere").code == 0
    assert command("test", "--ckpt_path", last, *QUIET).code == 0
    assert contents(Path("lightning_logs")) == before


def test_a_folder_on_a_read_only_disk(in_tmp_dir):
    sandboxed(_on_a_read_only_disk)


def _on_a_read_only_disk() -> None:
    Path("closed").mkdir()
    read_only(Path("closed"))
    command(*RUN, "--default_root_dir", "closed").refused("closed/lightning_logs", "--default_root_dir")
    command("bench", "--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--out", "closed/table").refused("--out")
    assert os.listdir() == ["closed"]


def test_a_study(in_tmp_dir):
    forked(_study)


def _study() -> None:
    runner.LocalWorkers = lambda workers: InLine()
    small = {"max_epochs": 1, "train_size": 96, "tasks": ["sort"]}
    study = Study(Path("study").resolve(), attn=["kv"], **small)
    os.chdir(study.root)
    assert command(*study.words()).code == 0
    before = contents(study.folder)
    study.write_grid(attn=["qkv", "kv"], **small)
    report = ["study", "report", *study.words()[2:5]]
    forbid(study.folder)
    for words in (study.words(), report):
        command(*words).refused("--folder", str(study.folder), "choose another")
    assert "1 to run, 1 finished" in command(*study.words("--dry_run")).out
    assert command(*report, "--out", "report").code == 0
    assert contents(study.folder) == before
