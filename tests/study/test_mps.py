"""`kvt study run --mps` starts and ends NVIDIA's MPS; here the program is a script, and the GPU a number."""

import os

import pytest
import torch

from kvt.study import runner
from kvt.study.mps import CONTROL, share_gpus
from kvt.study.workers import LocalWorkers
from kvt.system.errors import UserError

SCRIPT = """#!/bin/sh
if [ "$1" = -d ]; then
    echo "logs in $CUDA_MPS_LOG_DIRECTORY" >> {log}
    sleep 60 &  # the daemon: a program that waited for its output to end would hang
    echo $! > {daemon}
    exit {status}
fi
[ -e {daemon} ] || exit 1
read words
echo "$words" >> {log}
case $words in quit*) kill $(cat {daemon}); rm {daemon} ;; esac
exit 0
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU and MPS: `machine(status)` says how its start ends; return what is asked of it so far."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    log, daemon, program = (tmp_path / name for name in ("log", "daemon", CONTROL))
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)

    def make(status: int = 0, runs: bool = False):
        program.write_text(SCRIPT.format(log=log, daemon=daemon, status=status))
        program.chmod(0o700)
        if runs:
            daemon.touch()
        log.touch()
        return lambda: log.read_text().splitlines()

    return make


def test_it_starts_and_ends_with_the_study(machine, capfd):
    asked = machine()
    with share_gpus():
        (start,) = asked()
        folder = start.removeprefix("logs in ")
        assert os.path.isdir(folder)
    assert asked()[1:] == ["quit -t 5"]
    assert not os.path.exists(folder)
    assert capfd.readouterr().err == "MPS is started, and ends with the study\n"


def test_it_ends_with_a_study_that_fails(machine):
    asked = machine()
    with pytest.raises(ZeroDivisionError), share_gpus():
        raise ZeroDivisionError
    assert asked()[1:] == ["quit -t 5"]


def test_one_that_runs_is_left(machine, capfd):
    asked = machine(runs=True)
    with share_gpus():
        pass
    assert asked() == ["get_server_list"]
    assert capfd.readouterr().err == "MPS runs already: it is used, and goes on afterwards\n"


def refused(message):
    with pytest.raises(UserError, match=message), share_gpus():
        pass


def test_why_it_cannot_run(machine, monkeypatch):
    machine(status=1)
    refused("^--mps: .*non-zero exit status 1.* \\(some containers let only root start it\\): drop the flag$")
    monkeypatch.setenv("PATH", "/nowhere")
    refused(f"^--mps: there is no {CONTROL} on PATH: drop the flag$")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused("^--mps: this machine has no GPU: drop the flag$")


def test_workers_start_and_end_it(machine):
    asked = machine()
    engine = LocalWorkers(1, mps=True)
    assert len(asked()) == 1
    engine.close()
    assert asked()[1:] == ["quit -t 5"]


def test_it_is_not_for_ray(tmp_path):
    with pytest.raises(UserError, match="--mps: is for the GPUs of this machine, not for --ray"):
        runner.make_runs([], tmp_path, ray="auto", mps=True)
