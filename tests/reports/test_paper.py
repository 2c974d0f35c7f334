"""The paper's number for the settings of a single run."""

from collections import defaultdict

import pytest

from kvt.reports.paper import paper_of
from kvt.reports.tables import tables_of
from kvt.run.config import RunConfig
from kvt.study.grid import read_grid


@pytest.mark.parametrize("name", ["figure5", "figure6", "figure7", "table2", "table3"])
def test_a_run_has_the_number_of_its_cell(name):
    """Columns that the paper mislabels count by their right names."""
    grid = read_grid(name, "paper")
    runs, of = {run.name: run for run in grid.runs}, defaultdict(set)
    for run in grid.runs:
        of[run.attention].add(run.name)
    cells = [
        (table, runs[min(names & of[attention])], value)
        for table in tables_of(grid)
        for attention, columns in table.published_right.items()
        for column, value in columns.items()
        if (names := table.columns[column])
    ]
    assert cells
    for table, run, (mean, _) in cells:
        found = [text for metric, text in paper_of(run.config, run.task) if metric == table.metric]
        assert any(f"{table.metric} {table.kind.value(mean)}" in text for text in found)


@pytest.mark.parametrize("changes", [{"dim": 60}, {"max_epochs": 1}, {"train_size": 6400}, {"attn": "mqa"}])
def test_a_run_with_other_settings_has_none(changes):
    config = RunConfig.from_name("sort").changed(dim=64, length=64, attn="kv")
    assert [*paper_of(config.changed(accelerator="cpu", seed_everything=5), "sort")]
    assert not [*paper_of(config.changed(**changes), "sort")]
