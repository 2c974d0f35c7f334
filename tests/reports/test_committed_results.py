"""The committed reports are those of the records beside them."""

import re

import pandas as pd
import pytest
from claims import open_joined

from kvt.reports import report
from kvt.reports.figures import prefix_of_ids
from kvt.study.grid import read_grid
from kvt.study.records import read_record
from tests.conftest import REPOSITORY, slow

RECORDS = sorted(path.parent for path in (REPOSITORY / "docs" / "results").glob("*/record.yaml"))


LARGE = [folder for folder in RECORDS if (folder / "results.csv").read_bytes().count(b"\n") > 20]


@pytest.fixture(
    scope="module",
    params=[*(folder for folder in RECORDS if folder not in LARGE), *slow(*LARGE)],
    ids=lambda folder: folder.name,
)
def record(request):
    """The folder of a record, the grid that it names, and the rows."""
    found = read_record(request.param)
    return request.param, read_grid(found.grid, found.scale), found.rows


@pytest.mark.slow
def test_a_committed_report_is_drawn_again_from_its_record(record, tmp_path, monkeypatch):
    """Byte for byte; of pictures the data, of which their ids have a hash: the rest varies with matplotlib."""
    folder, grid, _ = record
    assert folder.name == f"{grid.name}-{grid.scale}"
    monkeypatch.setattr(report, "as_svg", lambda figure: f'<svg id="{prefix_of_ids(figure)}"/>')
    report.write_report(*open_joined(folder), tmp_path)
    assert (tmp_path / "report.md").read_bytes() == (folder / "report.md").read_bytes()
    ours, theirs = (pd.read_csv(place / "tables.csv") for place in (tmp_path, folder))
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-4)
    assert drawn(folder) == drawn(tmp_path)


def test_a_recorded_run_is_named_by_its_settings_and_found_by_its_grid(record):
    """However defaults change: otherwise nothing that was recorded would be found again."""
    _, grid, rows = record
    asked = {run.name: run.config for run in grid.runs}
    for row in rows:
        stored = row.outcome.config
        assert stored.name == row.name
        assert asked[row.name].name == row.name
        assert asked[row.name].differences(stored) == []


def drawn(folder):
    return {path.name: set(re.findall(r' id="f([0-9a-f]{8})-', path.read_text())) for path in folder.glob("*.svg")}
