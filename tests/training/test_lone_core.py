"""On one core and without shared memory, studies and runs of several processes work."""

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
@pytest.mark.parametrize("shared_memory", [closed, full])
def test_a_study_and_two_processes(in_tmp_dir, shared_memory):
    sandboxed(_study_and_two_processes, shared_memory)


def _study_and_two_processes(shared_memory) -> None:
    shared_memory()
    with pytest.raises(OSError, match=r"Read-only|No space"):
        Path("/dev/shm/something").write_text("more than nothing" * 1000)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    study = Study(Path("study").resolve(), attn=["qkv", "kv"], max_epochs=1, train_size=96, tasks=["sort"])
    for folder, words in (
        (study.root, [*KVT, *study.words(), "--workers", "2"]),
        (Path.cwd(), [*SCRIPT, "--devices", "2", "--strategy", "ddp"]),
    ):
        ended = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
    assert len(study.finished) == 2
    (path,) = Path("lightning_logs").rglob("result.json")
    assert "test/acc" in json.loads(path.read_text())
