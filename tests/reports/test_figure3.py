"""Figure 3: a map for each task and attention, from the runs of the grid figure3."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from kvt.attention import row_entropy
from kvt.cli.main import execute as command
from kvt.reports.figure3 import ATTENTIONS, TASKS, draw_figure3
from kvt.study import runner
from kvt.study.grid import read_grid
from kvt.system.files import GRIDS
from kvt.training.attention_plots import Layer, collect_maps
from kvt.training.load_checkpoint import Checkpoint, load
from tests.helpers.in_line import InLine

CELLS = [(task, attn) for task in TASKS for attn in ATTENTIONS]
TINY = {"dim": 16, "depth": 2, "heads": 2, "length": 6, "train_size": 16, "val_size": 4, "test_size": 4}
TINY |= {"batch_size": 8, "max_epochs": 1, "val_check_interval": None}


def entropy(layer: Layer) -> float:
    return row_entropy(layer.weights).mean().item()


def test_the_runs_are_the_papers_and_table_2s():
    runs = read_grid("figure3", "laptop").runs
    assert sorted((run.task, run.attention) for run in runs) == sorted(CELLS)
    assert {run.name for run in runs} <= {run.name for run in read_grid("table2", "paper").runs}


@pytest.mark.slow
def test_each_map_is_the_mean_of_the_layer_of_least_entropy(in_tmp_dir, monkeypatch):
    content = yaml.safe_load((GRIDS / "figure3.yaml").read_text()) | {"scales": {"tiny": {"axes": TINY}}}
    Path("figure3.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(runner, "LocalWorkers", lambda workers: InLine())
    command("study run", ["figure3.yaml"])
    runs = read_grid(Path("figure3.yaml")).runs
    checkpoints = {(run.task, run.attention): run.best_checkpoint(Path("lightning_logs/study")) for run in runs}
    figure = draw_figure3(checkpoints)
    assert len(figure.axes) == 15
    for axes, cell in zip(figure.axes, CELLS, strict=True):
        task, data = load(checkpoints[cell]), Checkpoint(checkpoints[cell]).load_data()
        assert (task.hparams["attn"], data.task_name) == (cell[1], cell[0])
        decided = min(collect_maps(task, data.example(0)), key=entropy)
        np.testing.assert_array_equal(axes.images[0].get_array(), decided.weights.mean(0), err_msg=str(cell))
        assert f"{ATTENTIONS[cell[1]]}, {decided.name}" in axes.get_title()
        assert f"entropy {entropy(decided):.2f}" in axes.get_title()
    command("study report", ["figure3.yaml", "--out", "report"])
    assert Path("report/maps.svg").is_file()
