"""Figure 3: a map for each task and attention, from the runs of the grid figure3."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from kvt.attention import row_entropy
from kvt.commands import execute as command
from kvt.grids.figure3 import draw_maps
from kvt.reports.tables import label
from kvt.run.load_checkpoint import Checkpoint, load
from kvt.study import runner
from kvt.study.grid import read_grid
from kvt.system import GRIDS
from kvt.view.maps import Layer, collect_maps, in_words
from tests.helpers.drivers import METRICS, RESULT, finish
from tests.helpers.in_line import InLine

CELLS = {(task, attn) for task in ("reverse", "sort", "swap", "sub", "copy") for attn in ("qkv", "kv", "kv+pos")}
TINY = {"dim": 16, "depth": 2, "heads": 2, "length": 6, "train_size": 16, "val_size": 4, "test_size": 4}
TINY |= {"batch_size": 8, "max_epochs": 1, "val_check_interval": None}


def entropy(layer: Layer) -> float:
    return row_entropy(layer.weights).mean().item()


def test_the_runs_are_the_papers_and_table_2s():
    runs = read_grid("figure3", "laptop").runs
    assert sorted((run.task, run.attention) for run in runs) == sorted(CELLS)
    assert {run.name for run in runs} <= {run.name for run in read_grid("table2", "paper").runs}


def write(**changes) -> None:
    content = yaml.safe_load((GRIDS / "figure3.yaml").read_text()) | {"scales": {"tiny": {"axes": TINY}}}
    Path("figure3.yaml").write_text(yaml.safe_dump(content | changes))


@pytest.mark.slow
def test_any_tasks_and_attentions_have_maps(in_tmp_dir, monkeypatch):
    """Also an attention of one's own: the grid names it. Of several runs it is the first."""
    Path("mine.py").write_text("from kvt.attention import KV\nclass Mine(KV): pass\n")
    monkeypatch.syspath_prepend(".")
    attentions = [{"attn": "mine.Mine"}, {"attn": "kv", "attn_kwargs": {"kv_heads": 1}}]
    write(tasks=["shift", "permute"], axes={"attention": attentions}, seeds=[0, 1])
    monkeypatch.setattr(runner, "LocalWorkers", lambda *_: InLine())
    command("study run", ["figure3.yaml"])
    command("study report", ["figure3.yaml", "--out", "report"])
    assert Path("report/maps.svg").is_file()


def test_only_finished_runs_have_maps(in_tmp_dir):
    """The checkpoint of any other may be of another configuration."""
    write(tasks=["sort"], axes={"attn": ["qkv", "kv"]})
    for run in read_grid(Path("figure3.yaml")).runs:
        path = finish(run, Path("runs"), RESULT | METRICS | {"diverged": "train/loss is nan"}) / "checkpoints/best.ckpt"
        path.parent.mkdir()
        path.write_bytes(b"not to be read")
    command("study report", ["figure3.yaml", "--folder", "runs", "--out", "report"])
    assert Path("report/report.md").is_file()
    assert not Path("report/maps.svg").exists()


@pytest.mark.slow
def test_each_map_is_the_mean_of_the_layer_of_least_entropy(in_tmp_dir, monkeypatch):
    write()
    monkeypatch.setattr(runner, "LocalWorkers", lambda *_: InLine())
    command("study run", ["figure3.yaml"])
    runs = read_grid(Path("figure3.yaml")).runs
    paths = {(run.task, run.attention): run.best_checkpoint(Path("lightning_logs/study")) for run in runs}
    assert paths.keys() == CELLS
    figure = draw_maps({cell: Checkpoint(path) for cell, path in paths.items()})
    panels = [axes for axes in figure.axes if axes.images]
    for axes, (cell, path) in zip(panels, paths.items(), strict=True):
        task, data = load(path), Checkpoint(path).load_data()
        assert (task.hparams["attn"], data.task_name) == (cell[1], cell[0])
        decided = min(collect_maps(task, data.example(0)), key=entropy)
        np.testing.assert_array_equal(axes.images[0].get_array(), decided.weights.mean(0), err_msg=str(cell))
        assert f"{label(cell[1])}, {in_words(decided.name)}" in axes.get_title()
        assert f"entropy {entropy(decided):.2f}" in axes.get_title()
    command("study report", ["figure3.yaml", "--out", "report"])
    assert Path("report/maps.svg").is_file()
