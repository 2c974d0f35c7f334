"""A study that is killed, again and again."""

import os
import random
import signal
import subprocess
import sys
from time import sleep

from tests.study.drivers import WORKERS, Study, alive, descendants, kill, until


def test_a_study_killed_at_any_moment_finds_the_same(study, uninterrupted):
    moments = random.Random(0)
    before = {}
    for _ in range(8):
        driver = study.start()
        sleep(moments.uniform(0.3, 3.5))
        driver.kill()
        until(lambda: not driver.workers, seconds=10)  # they die with it  # noqa: B023
        after = study.finished
        assert {run: after.get(run) for run in before} == before
        before = after
    study.run()
    assert {run: study.finished[run] for run in before} == before
    assert study.results == uninterrupted.results
    assert any("Restored all states" in study.log(run) for run in study.finished)
    assert all(study.log(run).count("tokens_per_second") <= 1 for run in study.finished)


def test_workers_that_are_killed_are_started_again(study, uninterrupted):
    moments = random.Random(1)
    driver = study.start()
    for _ in range(4):
        sleep(moments.uniform(0.3, 2))
        for worker in driver.workers[:1]:
            kill(worker)
    assert driver.join() == 0
    assert study.results == uninterrupted.results


def test_a_real_driver_takes_all_its_processes_along(study, uninterrupted):
    """Stopped by Ctrl-C, in one line, or by kill -9; the same command goes on."""
    assert stop(study, signal.SIGINT, 130) == ["stopped: the same command goes on"]
    assert stop(study, signal.SIGKILL, -signal.SIGKILL) == []
    study.run()
    assert study.results == uninterrupted.results


def stop(study: Study, by: signal.Signals, code: int) -> list[str]:
    """Starts the command as a shell does, stops it after its first run; returns the lines beside its progress bar."""
    command = [sys.executable, "-c", "from kvt.commands import main; main()", *study.words()]
    already = len(study.finished)
    driver = subprocess.Popen(command, cwd=study.root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: len(study.finished) > already)
    started = descendants(driver.pid)
    assert len(started) > WORKERS
    os.killpg(driver.pid, by) if by == signal.SIGINT else driver.kill()
    assert driver.stderr is not None
    errors = [line for line in driver.stderr.read().splitlines() if line.strip() and "so far" not in line]
    assert driver.wait(30) == code, errors
    until(lambda: not any(alive(pid) for pid in started), seconds=10)
    return errors
