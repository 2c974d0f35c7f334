"""A run of two processes: a signal to the first one stops both."""

import os
import subprocess
import sys
from signal import SIGTERM

import pytest

from tests.conftest import QUIET, REPOSITORY, SMALL_LISTS
from tests.helpers.drivers import alive, children, until, wait_for_training
from tests.helpers.runs import equal, read_history, read_result, weights

pytestmark = pytest.mark.slow


FLAGS = ["--devices=2", "--strategy=ddp", *QUIET, *SMALL_LISTS]


def start(*words: str) -> subprocess.Popen[str]:
    """Train with two processes."""
    command = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed


@pytest.mark.usefixtures("in_tmp_dir")
def test_a_signal_to_the_first_process_stops_both_within_half_a_minute_and_they_resume():
    lasting = [*FLAGS, "--max_epochs=40", "--log_every_n_steps=1"]
    process = start(*lasting)
    run = wait_for_training(process)
    (other,) = children(process.pid)
    process.send_signal(SIGTERM)
    until(lambda: process.poll() is not None and not alive(other), seconds=30)
    assert process.returncode == 128 + SIGTERM
    finish(start("--resume", str(run), "--enable_progress_bar=false"))
    finish(start(*lasting))
    whole = run.with_name("version_1")
    assert read_result(run) == read_result(whole)
    assert read_history(run) == read_history(whole)
    assert all(equal(weights(run, name), weights(whole, name)) for name in ("best", "last"))
