"""A task is called by its YAML, in names, tables and figures, whatever settings it shares with another."""

import pandas as pd
import pytest
import yaml

from kvt.cli.main import execute as command
from kvt.reports.report import _pictures, write_report
from kvt.reports.tables import summaries, tables_of
from kvt.study.grid import each_once, read_grid
from kvt.study.results import table_of_results
from kvt.study.run import Job, State, execute
from kvt.system.console import run
from kvt.system.errors import UserError
from tests.conftest import CONFIGS

SMALL = {"dim": 16, "depth": 1, "heads": 2, "batch_size": 16, "train_size": 64, "val_size": 16, "test_size": 16}
GRID = {"axes": {**SMALL, "max_epochs": 1, "attn": ["qkv", "kv"]}, "seeds": [0], "scales": {"all": None}}


@pytest.fixture
def write(tmp_path):
    """Writes a grid of such tasks, beside it YAMLs with the contents of reverse.yaml, and reads it."""

    def call(tasks, *copies: str, name: str = "mine", **axes):
        (tmp_path / "grids").mkdir(exist_ok=True)
        if not (tmp_path / "configs").exists():
            (tmp_path / "configs").symlink_to(CONFIGS)
        for copy in copies:
            (tmp_path / "grids" / copy).write_text((CONFIGS / "reverse.yaml").read_text())
        path = tmp_path / "grids" / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**GRID, "tasks": tasks, "axes": {**GRID["axes"], **axes}}, sort_keys=False))
        return read_grid(path, "all")

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs: what is made for one test need not be made for another."""
    return tmp_path_factory.mktemp("runs")


def test_two_tasks_of_the_same_data_are_two_columns_rows_and_groups(write, runs, tmp_path):
    grid = write({"reverse": {"length": 4}, "reverse_long.yaml": {"length": 8}}, "reverse_long.yaml")
    tasks = ["reverse", "reverse_long"]
    for one in grid.runs:
        assert execute(Job(one.config, one.folder(runs), "data")).state == State.FINISHED
    results = table_of_results(grid, runs)
    (table,) = tables_of(grid)
    assert list(table.columns) == tasks
    for (attention, task), cell in summaries(results, table).items():
        rows = results[(results.attention == attention) & (results.task == task)]
        assert (cell.runs, cell.mean) == (1, rows["test/acc"].item())
    pictures = _pictures(grid, runs, results)
    titles = [axes.get_title(loc="left") for axes in pictures["loss"].axes]
    assert titles == ["reverse", "", "reverse long", ""]
    assert [tick.get_text() for tick in pictures["bars-test-acc"].axes[0].get_xticklabels()] == [titles[0], titles[2]]
    written = write_report(grid, runs, tmp_path / "report", margin=1)
    assert "|  | reverse | reverse_long | mean |" in written.markdown.read_text()
    assert list(pd.read_csv(written.csv).task) == ["reverse", "reverse_long"] * 2


def test_a_task_of_a_yaml_of_ones_own_has_a_table(write):
    grid = write(["myrev.yaml"], "myrev.yaml")
    (table,) = tables_of(grid)
    assert table.columns == {"myrev": frozenset(run.name for run in grid.runs)}


def test_the_name_is_all_of_the_stem(write):
    grid = write(["reverse.v2.yaml", "sort"], "reverse.v2.yaml")
    assert {run.task for run in grid.runs} == {"reverse.v2", "sort"}
    beside = write(["sort", "../configs/copy.yaml"])
    assert {run.task for run in beside.runs} == {"sort", "copy"}


def test_a_name_with_a_dot_is_not_cut(write, tmp_path):
    """Nor do `sort.v2` and `sort` collide."""
    (tmp_path / "configs").mkdir()
    for name in ("sort", "sort.v2"):
        (tmp_path / "configs" / f"{name}.yaml").write_text((CONFIGS / "sort.yaml").read_text())
    grid = write({"sort": {"length": 4}, "sort.v2": {"length": 8}})
    assert {run.task for run in grid.runs} == {"sort", "sort.v2"}


def test_a_run_that_two_tasks_ask_for_is_a_mistake(write):
    """It has one folder, and would be missing from one of the columns."""
    with pytest.raises(UserError, match=r"mine\.yaml: again and reverse ask for the same run, qkv length=8 seed=0: "):
        write({"reverse": {"length": [4, 8]}, "again.yaml": {"length": [8, 16]}}, "again.yaml")
    ours, theirs = write(["reverse"]), write(["again.yaml"], "again.yaml", name="other")
    with pytest.raises(UserError, match="reverse and again ask for the same run"):
        each_once([*ours.runs, *theirs.runs])
    assert each_once([*ours.runs, *ours.runs]) == [*ours.runs]


def test_two_grids_with_one_run_under_two_names_are_a_mistake(write, tmp_path, mistake):
    write(["reverse"])
    write(["again.yaml"], "again.yaml", name="other")
    grids = [str(tmp_path / "grids" / f"{name}.yaml") for name in ("mine", "other")]
    message = mistake(lambda: run(lambda: command("study run", [*grids, "--scale", "all", "--dry_run"])))
    assert "reverse and again ask for the same run" in message


@pytest.mark.parametrize("axis", [{"task": ["reverse", "sort"]}, {"kind": [{"task": "sort", "length": 4}]}])
def test_what_a_task_is_called_is_no_axis(write, axis):
    """Lists of another kind would stand under the name of the first."""
    with pytest.raises(UserError, match=r"mine\.yaml: task is no axis: name tasks under tasks:"):
        write(["reverse"], **axis)
