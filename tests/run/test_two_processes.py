"""A run of two processes: a share of a metric is noted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvt.tasks import ListTask
from kvt.tasks.metrics import Metric
from tests.conftest import QUIET, REPOSITORY, SMALL_LISTS

pytestmark = pytest.mark.slow


def rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")


class SharingTask(ListTask):
    """Records a number for each process."""

    metrics = (*ListTask.metrics, Metric("share", how="recorded", stages=("val",)))

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.record("val/share", float(rank()))


def train(*words: str) -> subprocess.CompletedProcess:
    """Train with two processes."""
    flags = ["--max_epochs=1", "--devices=2", "--strategy=ddp", *QUIET, *SMALL_LISTS, *words]
    command = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *flags]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.usefixtures("in_tmp_dir")
def test_a_metric_of_one_process_alone_is_noted():
    ended = train("--model", f"{__name__}.SharingTask")
    assert ended.returncode == 0, ended.stderr
    (path,) = Path().rglob("result.json")
    notes = json.loads(path.read_text())["notes"]
    assert notes["val/share"] == "of the first process alone, which has a part of the rows"
