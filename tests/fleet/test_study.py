"""A study whose runs are trained together finds what it finds alone, here in float64."""

import csv
import json
import shutil
from collections.abc import Mapping

import pandas as pd
import pytest
import yaml

from kvt.reports.report import write_report
from kvt.study.grid import read_grid
from kvt.study.records import State, table_of_histories, table_of_results
from kvt.study.run import Job, execute, fleets
from kvt.study.runner import work_off
from kvt.study.workers import LocalWorkers
from tests.conftest import CONFIGS, SMALL_LISTS
from tests.helpers.drivers import RESULT
from tests.helpers.in_line import InLine

LONELY = """
import os, signal
import torch
from kvt.attention import KV

class Lonely(KV):
    def forward(self, x, *args, **kwargs):
        if torch._C._functorch.is_batchedtensor(x):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, *args, **kwargs)
"""
"""An attention that kills its process where it is one of several."""


@pytest.fixture
def grid(in_tmp_dir):
    """Writes a grid of small runs in float64, and reads it."""

    def write(axes: Mapping[str, object], tasks: tuple[str, ...] = ("sort", "copy")):
        small = {
            name.removeprefix("--"): int(value) for name, value in zip(SMALL_LISTS[::2], SMALL_LISTS[1::2], strict=True)
        }
        common = {"precision": "64-true", "accelerator": "cpu", "max_epochs": 2, "depth": 1, "heads": 2}
        path = in_tmp_dir / "grid.yaml"
        files = [str(CONFIGS / f"{task}.yaml") for task in tasks]
        content = {"tasks": files, "axes": {**common, **small, **axes}, "seeds": [0, 1], "scales": {"laptop": None}}
        path.write_text(json.dumps(content))
        return read_grid(path, "laptop")

    return write


def results(runs, root) -> dict[str, dict[str, float]]:
    found = {}
    for run in runs:
        whole = json.loads((run.folder(root) / "result.json").read_text())
        found[run.name] = {name: value for name, value in whole.items() if "/" in name}
    return found


@pytest.mark.slow
def test_same_results_in_the_same_places(grid, in_tmp_dir):
    runs = grid({"attn": ["kv", "qkv"], "lr": [1e-3, 1e-2]}).runs
    alone, together = InLine(), InLine()
    for engine, size in ((alone, 1), (together, 3)):
        outcomes = [*work_off(runs, in_tmp_dir / str(size), "", engine, fleet=size)]
        assert {run.name for run, _ in outcomes} == {run.name for run in runs}
        assert all(outcome.state == State.FINISHED for _, outcome in outcomes)
    assert alone.sizes == [1] * 16
    assert sorted(together.sizes) == [2, 2, 3, 3, 3, 3]
    found = results(runs, in_tmp_dir / "3")
    for name, result in results(runs, in_tmp_dir / "1").items():
        assert found[name] == pytest.approx(result, rel=1e-6)
    assert not [*(in_tmp_dir / "3").rglob("last.ckpt")]


def test_a_fleet_that_fails_is_made_run_by_run(grid, in_tmp_dir, monkeypatch):
    """The run at fault records its error, the others are finished."""
    runs = grid({"attn": "kv", "lr": [1e-3, -1.0]}, tasks=("sort",)).runs
    engine = InLine()
    states = {run.value("lr"): [] for run in runs}
    for run, outcome in work_off(runs, in_tmp_dir, "", engine, fleet=4):
        states[run.value("lr")].append(outcome.state)
    assert states == {1e-3: [State.FINISHED] * 2, -1.0: [State.FAILED] * 2}
    assert engine.sizes[0] == 4


def test_what_does_not_go_together_is_not_put_together(grid, tmp_path):
    runs = grid({"attn": ["kv", "qkv"], "dim": [16, 32]}).runs
    jobs = [Job(run.config, run.folder(tmp_path), "") for run in runs]
    assert fleets(jobs, 1) == [[job] for job in jobs]
    for members in fleets(jobs, 9):
        assert len({repr(one.config["model"]) for one in members}) == 1
        assert len(members) == 4  # two tasks, two seeds


def test_what_no_fleet_can_train_is_left_alone(grid, tmp_path):
    """By its task, or because no other is at its step."""
    for name in ("characters", "human_numbers", "translation"):
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        jobs = [Job(config | {"seed_everything": n}, tmp_path / name / "kv" / str(n), "") for n in range(3)]
        assert fleets(jobs, 9) == [[job] for job in jobs]
    jobs = [Job(run.config, run.folder(tmp_path), "") for run in grid({"attn": "kv", "lr": [1e-3, 1e-2]}).runs]
    ahead, beside, torn, *new = jobs
    execute(ahead)
    begin(ahead, ahead)
    begin(ahead, beside)
    (torn.folder / "checkpoints").mkdir(parents=True)
    (torn.folder / "checkpoints" / "last.ckpt").write_bytes(b"PK")  # begins anew
    put = [{job.folder for job in group} for group in fleets(jobs, 9)]
    assert sorted(put, key=len) == [
        {ahead.folder, beside.folder},
        {job.folder for job in (torn, *new)},
    ]


def begin(finished: Job, job: Job) -> None:
    """Leaves a job as if it had been killed where another has its best checkpoint."""
    checkpoints = job.folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.copy(finished.folder / "checkpoints" / "best.ckpt", checkpoints / "last.ckpt")
    (job.folder / "result.json").unlink(missing_ok=True)


@pytest.mark.parametrize(("workers", "size"), [(1, 8), (3, 3), (9, 1)])
def test_no_worker_is_idle_for_the_sake_of_a_fleet(grid, tmp_path, workers, size):
    jobs = [Job(run.config, run.folder(tmp_path), "") for run in grid({"attn": "kv", "lr": [1e-3, 1e-2]}).runs]
    assert len(fleets(jobs, 16, workers)[0]) == size


@pytest.mark.slow
def test_a_fleet_whose_process_dies_is_made_run_by_run(grid, in_tmp_dir, monkeypatch):
    (in_tmp_dir / "lonely.py").write_text(LONELY)
    monkeypatch.syspath_prepend(in_tmp_dir)
    found = grid({"attn": "lonely.Lonely"}, tasks=("sort",))
    engine = LocalWorkers(1)
    outcomes = [outcome for _, outcome in work_off(found.runs, in_tmp_dir, "", engine, fleet=2)]
    assert [outcome.state for outcome in outcomes] == [State.FINISHED] * 2
    begun = [file.read_text().count("Seed set") for file in (in_tmp_dir / ".logs").iterdir()]
    assert sorted(begun) == [1, 3]  # each alone, after both together
    assert set(table_of_results(found, in_tmp_dir).fleet) == {1}


def test_each_run_of_a_fleet_has_its_share_of_the_time(grid, in_tmp_dir):
    found = grid({"attn": ["kv", "qkv"]}, tasks=("sort",))
    [*work_off(found.runs, in_tmp_dir, "", InLine(), fleet=2)]
    whole = {
        run.attention: json.loads((run.folder(in_tmp_dir) / "result.json").read_text())["seconds"] for run in found.runs
    }
    results, histories = table_of_results(found, in_tmp_dir), table_of_histories(found, in_tmp_dir)
    assert set(results.fleet) == {2}
    for attention, seconds in whole.items():
        assert results[results.attention == attention].seconds.sum() == pytest.approx(seconds)
    logged = pd.concat([pd.read_csv(run.folder(in_tmp_dir) / "history.csv") for run in found.runs])
    assert [*histories.seconds] == [*(logged.seconds / 2)]
    written = write_report(found, in_tmp_dir, in_tmp_dir / "report", 1.0)
    assert [row["fleet"] for row in csv.DictReader(written.csv.open())] == ["2"] * 4
    ratio = f"| {whole['qkv'] / whole['kv']:.2f} ("
    assert ratio in written.markdown.read_text()
    for run in [run for run in found.runs if run.attention == "kv"]:  # as if they had been alone: no pair is left
        file = run.folder(in_tmp_dir) / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"fleet": 1}))
    assert "| QKV |" not in write_report(found, in_tmp_dir, in_tmp_dir, 1.0).markdown.read_text().split("## Costs")[1]


def test_a_result_without_a_fleet_is_of_one_run(grid, in_tmp_dir):
    found = grid({"attn": "kv"}, tasks=("sort",))
    for run in found.runs:
        run.folder(in_tmp_dir).mkdir(parents=True)
        (run.folder(in_tmp_dir) / "result.json").write_text(json.dumps(RESULT))
        pd.DataFrame({"step": [1], "seconds": [2.0]}).to_csv(run.folder(in_tmp_dir) / "history.csv", index=False)
    results = table_of_results(found, in_tmp_dir)
    assert [*results.fleet] == [1, 1]
    assert [*results.seconds] == [3.0, 3.0]
    assert [*table_of_histories(found, in_tmp_dir).seconds] == [2.0, 2.0]
