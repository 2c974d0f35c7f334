"""A study that is killed, again and again."""

import os
import random
import re
import signal
import subprocess
import sys
from time import sleep

import pandas as pd
import pytest

from kvt.commands import execute
from kvt.study.runner import ATTEMPTS
from tests.helpers.drivers import WORKERS, Study, alive, descendants, kill, until

pytestmark = pytest.mark.slow


def test_a_killed_study_of_20_runs_ends_with_the_table_of_an_unbroken_one(tmp_path):
    """It is killed six times. No finished run is made again."""
    broken, whole = Study(tmp_path / "broken"), Study(tmp_path / "whole")
    for study in (broken, whole):
        study.write_grid(attn=["qkv", "kv"], lr=[0.001, 0.002, 0.003, 0.004, 0.005])
    moments, before = random.Random(0), {}
    for attempt in range(6):
        driver, begun = broken.start(), broken.checkpoints
        if attempt % 2:  # where it can go on, not only where it starts
            until(lambda: broken.checkpoints - begun or driver.join(0) == 0)  # noqa: B023
        sleep(moments.uniform(0, 3) if attempt != 1 else 0)
        driver.kill()
        until(lambda: not driver.workers)  # noqa: B023
        after = broken.finished
        assert {run: after.get(run) for run in before} == before
        before = after
    assert 0 < len(before) < 20
    for study in (broken, whole):
        study.run()
    assert {run: broken.finished[run] for run in before} == before
    assert broken.results == whole.results
    assert tables(broken) == tables(whole)
    assert any("Restored all states" in broken.log(run) for run in broken.finished)
    assert all(broken.log(run).count("tokens_per_second") <= 1 for run in broken.finished)


def tables(study: Study) -> tuple[str, list[str]]:
    """Return the rows of a record of the study and the lines of its report, without times."""
    grid, record, report = (study.root / name for name in ("grids/small.yaml", "record", "report"))
    execute("study record", [str(grid), "--out", str(record), "--from", str(study.folder)])
    execute("study report", [str(grid), "--out", str(report), "--from", str(record)])
    rows = pd.read_csv(record / "results.csv").drop(columns=["seconds", "started", "finished", "tokens_per_second"])
    lines = (report / "report.md").read_text().splitlines()
    return rows.to_csv(), [line for line in lines if not re.search(r"seconds|hours|tokens|\d–\d", line)]


def test_workers_that_are_killed_are_started_again(study, uninterrupted):
    moments = random.Random(1)
    driver = study.start()
    for _ in range(ATTEMPTS - 1):  # perhaps the same run's
        until(lambda: driver.workers or driver.join(0) == 0)
        sleep(moments.uniform(0, 0.5))
        for worker in driver.workers[:1]:
            kill(worker)
    assert driver.join() == 0
    assert study.results == uninterrupted.results


def test_the_signals_of_clusters_end_no_run_without_a_checkpoint(study):
    """The run of a worker that gets one goes on in another process; a study that gets one saves all of its runs."""
    study.write_grid(tasks=["sort"], attn=["qkv", "kv"], max_epochs=10_000)
    driver = study.start()
    until(lambda: len(study.checkpoints) == 2)

    def stops() -> list[int]:
        return [file.read_text().count("resume with --resume") for file in (study.folder / ".logs").iterdir()]

    os.kill(driver.workers[0], signal.SIGUSR2)
    until(lambda: sorted(stops()) == [0, 1])
    until(lambda: any("Restored all states" in file.read_text() for file in (study.folder / ".logs").iterdir()))
    os.kill(driver.process.pid, signal.SIGUSR1)
    assert driver.join() == 128 + signal.SIGUSR1
    assert sorted(stops()) == [1, 2]
    assert driver.printed.splitlines()[-1] == "2 of 2 runs are left: the same command continues them"
    until(lambda: not driver.workers)


def test_each_process_of_a_slurm_job_makes_whole_runs(study):
    study.write_grid(tasks=["sort"], attn=["qkv", "kv"])
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "study", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    command = [sys.executable, "-m", "kvt", *study.words("--workers", "1")]
    started = []
    for rank in ("0", "1"):
        own = os.environ | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        started.append(subprocess.Popen(command, cwd=study.root, env=own, stdout=subprocess.DEVNULL))
    assert [process.wait(300) for process in started] == [0, 0]
    for file in study.result_files:
        assert [*file.parent.glob("events.*")], "a process of rank 1 would log nothing"
    assert len(study.result_files) == 2


def test_ctrl_c_stops_everything_in_one_line(study, uninterrupted):
    command = [sys.executable, "-c", "from kvt.commands import main; main()", *study.words()]  # as a shell starts it
    driver = subprocess.Popen(command, cwd=study.root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: study.finished)
    started = descendants(driver.pid)
    assert len(started) > WORKERS
    os.killpg(driver.pid, signal.SIGINT)
    errors = driver.communicate(timeout=30)[1].splitlines()
    assert driver.returncode == 130
    left, stopped = [line for line in errors if line.strip() and "so far" not in line]
    assert re.fullmatch(r"\d of 6 runs are left: the same command continues them", left)
    assert stopped == "stopped"
    until(lambda: not any(alive(pid) for pid in started), seconds=10)
    study.run()
    assert study.results == uninterrupted.results
