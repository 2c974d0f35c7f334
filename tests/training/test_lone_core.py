"""A machine with one core, and no memory that processes share: all that starts processes still works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUIET, REPOSITORY, SMALL_LISTS
from tests.helpers.drivers import Study
from tests.helpers.sandbox import disk, read_only, sandboxed

KVT = ["-c", "from kvt.cli.main import main; main()"]
SCRIPT = [str(REPOSITORY / "experiments" / "synthetic.py"), *QUIET, *SMALL_LISTS, "--max_epochs", "1"]


def closed() -> None:
    disk(Path("/dev/shm"))
    read_only(Path("/dev/shm"))


def full() -> None:
    disk(Path("/dev/shm"), kibibytes=4, files=1)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [closed, full])
def test_a_study_and_runs(in_tmp_dir, shared):
    sandboxed(_study_and_runs, shared)


def _study_and_runs(shared) -> None:
    shared()
    with pytest.raises(OSError, match=r"Read-only|No space"):
        Path("/dev/shm/something").write_text("more than nothing" * 1000)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    study = Study(Path("study").resolve(), attn=["qkv", "kv"], max_epochs=1, train_size=96, tasks=["sort"])
    ended(study.root, *KVT, *study.words(), "--workers", "2")
    assert len(study.finished) == 2
    ended(Path.cwd(), *SCRIPT, "--devices", "2", "--strategy", "ddp")
    (path,) = Path("lightning_logs").rglob("result.json")
    assert "test/acc" in json.loads(path.read_text())


def ended(folder: Path, *words: str) -> None:
    process = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
