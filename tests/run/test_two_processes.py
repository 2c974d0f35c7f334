"""A run of two processes: errors of either are told once, both have the same data, and a share of a metric is noted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvt.system.errors import UserError
from kvt.tasks import DigitLists, ListTask
from kvt.tasks.metrics import Metric
from tests.conftest import QUIET, REPOSITORY, SMALL_LISTS

pytestmark = pytest.mark.slow

MISTAKE = "this process has found a mistake"


def rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")


class Failing(DigitLists):
    """Cannot be read by the processes in FAILS, nor does each read the same if that is "differ"."""

    def load(self):
        if rank() in os.environ["FAILS"] and "LOCAL_RANK" in os.environ:
            raise UserError(MISTAKE)
        self.content = rank() if os.environ["FAILS"] == "differ" else "same"
        return super().load()


class FailingTask(ListTask):
    """Fails at the third step of the processes in FAILS, with an error of a type; records a number for each process."""

    metrics = (*ListTask.metrics, Metric("share", how="recorded", stages=("val",)))

    def training_step(self, batch, batch_idx):
        where, _, kind = os.environ["FAILS"].partition(":")
        if batch_idx == 2 and kind and rank() in where:
            raise {"UserError": UserError, "Bug": RuntimeError}[kind](MISTAKE)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.record("val/share", float(rank()))


def train(fails: str, *words: str) -> subprocess.CompletedProcess:
    """Train with two processes."""
    flags = ["--max_epochs=1", "--devices=2", "--strategy=ddp", *QUIET, *SMALL_LISTS, *words]
    command = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *flags]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "FAILS": fails}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.usefixtures("in_tmp_dir")
@pytest.mark.parametrize("fails", ["1", "1:UserError", "1:Bug", "01:UserError"])
def test_the_first_error_of_any_process_is_printed_once_with_its_rank(fails):
    ended = train(fails, "--data" if len(fails) == 1 else "--model", f"{__name__}.Failing{'Task' * (len(fails) > 1)}")
    assert ended.returncode != 0
    assert ended.stderr.count(MISTAKE) == 1, ended.stderr
    assert "rank 1: " in ended.stderr or (fails.startswith("0") and "rank 0: " in ended.stderr)
    assert ("Traceback" in ended.stderr) == ("Bug" in fails)
    assert "another process" not in ended.stderr


@pytest.mark.usefixtures("in_tmp_dir")
def test_processes_with_different_data_do_not_train():
    ended = train("differ", "--data", f"{__name__}.Failing")
    assert ended.returncode != 0
    assert ended.stderr.count("the data changed while the processes of this run started") == 1, ended.stderr
    assert not Path("lightning_logs").exists()


@pytest.mark.usefixtures("in_tmp_dir")
def test_a_metric_of_one_process_alone_is_noted():
    ended = train("", "--model", f"{__name__}.FailingTask")
    assert ended.returncode == 0, ended.stderr
    (path,) = Path().rglob("result.json")
    assert json.loads(path.read_text())["notes"] == {
        "val/share": "of the first process alone, which has a part of the rows"
    }
