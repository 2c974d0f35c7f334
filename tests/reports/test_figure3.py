"""Figure 3: a map for each task and attention, from the runs of the grid figure3."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from kvt.attention import row_entropy
from kvt.cli.main import execute as command
from kvt.reports import figure3
from kvt.reports.figure3 import ATTENTIONS, make_figure3
from kvt.study import runner
from kvt.study.grid import find_grid, read_grid
from kvt.system.errors import UserError
from kvt.system.files import GRIDS
from kvt.tasks.synthetic import TASKS
from kvt.training.attention_plots import Layer, collect_maps
from kvt.training.load_checkpoint import Checkpoint, load
from tests.helpers.in_line import InLine

CELLS = [(task, attn) for task in TASKS for attn in ATTENTIONS]
TINY = {"dim": 16, "depth": 2, "heads": 2, "length": 6, "train_size": 16, "val_size": 4, "test_size": 4}
TINY |= {"batch_size": 8, "max_epochs": 1, "val_check_interval": None}


@pytest.fixture
def tiny(in_tmp_dir, monkeypatch):
    """The grid figure3 with tiny runs, made in this process."""
    content = yaml.safe_load((GRIDS / "figure3.yaml").read_text())
    content["scales"] = {figure3.SCALE: {"axes": TINY}}
    Path("figure3.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(figure3, "GRIDS", Path())
    monkeypatch.setattr(runner, "LocalWorkers", lambda workers: InLine())


def entropy(layer: Layer) -> float:
    return row_entropy(layer.weights).mean().item()


def test_the_runs_are_the_papers_and_table_2s():
    runs = read_grid(find_grid("figure3"), figure3.SCALE).runs
    assert sorted((run.task, run.attention) for run in runs) == sorted(CELLS)
    assert {run.name for run in runs} <= {run.name for run in read_grid(find_grid("table2"), "paper").runs}


@pytest.mark.slow
def test_finished_runs_are_drawn_and_the_others_made_first(tiny, capsys):
    command("maps", ["--figure3", "--out", "first.png", "--example", "1"])
    assert capsys.readouterr().out.startswith("15 runs: 15 to run")
    root = Path("lightning_logs/study")
    runs = read_grid(Path("figure3.yaml")).runs
    checkpoints = {(run.task, run.attention): run.best_checkpoint(root) for run in runs}
    next(root.glob("sort/kv/*/result.json")).unlink()
    figure = make_figure3(1)
    assert capsys.readouterr().out.startswith("15 runs: 1 begun, 14 finished")
    assert len(figure.axes) == 15
    for axes, cell in zip(figure.axes, CELLS, strict=True):
        task, data = load(checkpoints[cell]), Checkpoint(checkpoints[cell]).load_data()
        assert (task.hparams["attn"], data.task_name) == (cell[1], cell[0])
        decided = min(collect_maps(task, data.example(1)), key=entropy)
        np.testing.assert_array_equal(axes.images[0].get_array(), decided.weights.mean(0), err_msg=str(cell))
        assert f"{ATTENTIONS[cell[1]]}, {decided.name}" in axes.get_title()
        assert f"entropy {entropy(decided):.2f}" in axes.get_title()
    assert Path("first.png").is_file()


def test_an_example_that_is_not_there_and_runs_that_fail_are_mistakes(tiny, monkeypatch):
    with pytest.raises(UserError, match="example=1000"):
        make_figure3(1000)
    assert not Path("lightning_logs").exists()
    monkeypatch.setattr("kvt.study.run.StudyCLI", lambda *args: 1 / 0)
    with pytest.raises(UserError, match=r"15 runs failed or are damaged: .*--retry_failed"):
        make_figure3()
