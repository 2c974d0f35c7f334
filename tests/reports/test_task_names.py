"""A task has the name of its YAML in tables and figures, whatever settings it shares with another."""

import pandas as pd
import pytest
import yaml

from kvt.commands import execute as command
from kvt.reports.report import write_report
from kvt.study.grid import deduplicate, read_grid
from kvt.study.outcomes import read_outcomes
from kvt.system import CONFIGS, UserError, run
from tests.helpers.drivers import finish
from tests.study.test_command import TINY

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def write(tmp_path):
    """Writes a grid of these tasks, and copies of reverse.yaml beside it; reads the grid."""

    def call(tasks, *copies: str, name: str = "mine"):
        for copy in copies:
            (tmp_path / copy).write_text((CONFIGS / "reverse.yaml").read_text())
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**TINY, "tasks": tasks}, sort_keys=False))
        return read_grid(path)

    return call


def test_two_tasks_of_the_same_data_are_two_columns_and_rows(write, tmp_path):
    grid, root = write({"reverse": {"length": 4}, "reverse_long.yaml": {"length": 8}}, "reverse_long.yaml"), tmp_path
    for one in grid.runs:
        finish(one, root)
    write_report(grid, read_outcomes(grid.runs, root), tmp_path / "report")
    assert "|  | reverse | reverse_long | mean |" in (tmp_path / "report" / "report.md").read_text()
    assert list(pd.read_csv(tmp_path / "report" / "runs.csv").task) == ["reverse", "reverse_long"] * 2
    cells = pd.read_csv(tmp_path / "report" / "tables.csv")
    assert {*zip(cells.column, cells.runs, strict=True)} == {("reverse", 1), ("reverse_long", 1)}


def test_a_run_that_two_tasks_ask_for_is_a_mistake(write, tmp_path, mistake):
    """It has one folder, and would be missing from one of the columns."""
    with pytest.raises(UserError, match=r"mine\.yaml: again and reverse contain the same run"):
        write({"reverse": {"length": [4, 8]}, "again.yaml": {"length": [8, 16]}}, "again.yaml")
    ours, _ = write(["reverse"]), write(["again.yaml"], "again.yaml", name="other")
    assert deduplicate([*ours.runs, *ours.runs]) == [*ours.runs]
    grids = [str(tmp_path / f"{name}.yaml") for name in ("mine", "other")]
    message = mistake(lambda: run(lambda: command("study run", [*grids, "--dry_run"])))
    assert "reverse and again contain the same run" in message
