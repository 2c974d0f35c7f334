"""A run of two processes: both have the same data, and a share of a metric is noted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvt.tasks import DigitLists, ListTask
from kvt.tasks.metrics import Metric
from tests.conftest import QUIET, REPOSITORY, SMALL_LISTS

pytestmark = pytest.mark.slow


def rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")


class Differing(DigitLists):
    """Has other content in each process."""

    def load(self):
        self.content = rank()
        return super().load()


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
def test_processes_with_different_data_do_not_train():
    ended = train("--data", f"{__name__}.Differing")
    assert ended.returncode != 0
    assert ended.stderr.count("the data changed while the processes of this run started") == 1, ended.stderr
    assert not Path("lightning_logs").exists()


@pytest.mark.usefixtures("in_tmp_dir")
def test_a_metric_of_one_process_alone_is_noted():
    ended = train("--model", f"{__name__}.SharingTask")
    assert ended.returncode == 0, ended.stderr
    (path,) = Path().rglob("result.json")
    assert json.loads(path.read_text())["notes"] == {
        "val/share": "of the first process alone, which has a part of the rows"
    }
