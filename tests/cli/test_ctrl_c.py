"""Ctrl-C at any moment: a line, exit code 130, and what can be saved is saved, though nobody may read on."""

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGINT
from time import sleep

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import REPOSITORY, SMALL_LISTS
from tests.helpers.drivers import children, wait_for_training
from tests.helpers.runs import checkpoint

SCRIPT = [str(REPOSITORY / "experiments" / "synthetic.py")]
KVT = ["-c", "from kvt.cli.main import main; main()", "fit", "--help"]
SLOWLY = ["--task=reverse", "--accelerator=cpu", *SMALL_LISTS, "--max_epochs=100000"]
DDP = ["--devices=2", "--strategy=ddp"]


def start(*words: str, **streams: int) -> subprocess.Popen[str]:
    """A process with a group of its own, as a shell starts one."""
    return subprocess.Popen([sys.executable, *words], text=True, start_new_session=True, **streams)


@pytest.mark.slow
@pytest.mark.parametrize("command", [SCRIPT, KVT], ids=["script", "kvt"])
@pytest.mark.parametrize("module", ["yaml", "torch", "lightning", "kvt.cli.lightning_cli"])
def test_while_it_imports(command, module, in_tmp_dir):
    with start("-X", "importtime", *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if line.split()[-1] == module:
                os.killpg(process.pid, SIGINT)
                break
        said = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.returncode == 128 + SIGINT, said
    assert said == ["stopped\n"]
    assert not [*Path().iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], DDP], ids=["one", "two"])
@pytest.mark.parametrize("bar", ["true", "false"])
def test_the_reader_has_gone(bar, processes, in_tmp_dir):
    """As in `2>&1 | tee log`, where Ctrl-C ends tee too."""
    reading, writing = os.pipe()
    flags = [*processes, f"--enable_progress_bar={bar}", "--log_every_n_steps=1"]
    with start(*SCRIPT, *SLOWLY, *flags, stdout=writing, stderr=writing) as process:
        os.close(writing)
        run = wait_for_training(process)
        os.close(reading)
        os.killpg(process.pid, SIGINT)
    assert process.returncode == 128 + SIGINT
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("train/loss")]
    assert checkpoint(run, "last")["global_step"] == steps[-1] + 1


@pytest.mark.slow
def test_while_another_process_of_the_run_starts(in_tmp_dir):
    with start(*SCRIPT, *SLOWLY, *DDP, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not children(process.pid):
            sleep(0.1)
        sleep(1)  # while the other one imports
        os.killpg(process.pid, SIGINT)
        said = process.stderr.read()
    assert process.returncode in (-SIGINT, 128 + SIGINT)  # both are 130 to a shell
    assert said in ("", "stopped\n")
    assert not [*Path().iterdir()]
