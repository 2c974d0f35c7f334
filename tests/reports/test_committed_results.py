"""The committed reports are those of the records beside them."""

import re

import pandas as pd
import pytest

from kvt.reports.report import write_report
from kvt.study.grid import read_grid
from kvt.study.records import find_outcomes, read_record
from tests.conftest import REPOSITORY

RECORDS = sorted(path.parent for path in (REPOSITORY / "docs" / "results").glob("*/manifest.json"))


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_committed_report_is_drawn_again_from_its_record(folder, tmp_path):
    """Byte for byte; of pictures the data, of which their ids have a hash: the rest varies with matplotlib."""
    manifest, _ = read_record(folder)
    grid = read_grid(manifest.grid, manifest.scale)
    assert folder.name == f"{grid.name}-{grid.scale}"
    write_report(grid, find_outcomes(grid.runs, [folder]), tmp_path)
    assert (tmp_path / "report.md").read_bytes() == (folder / "report.md").read_bytes()
    ours, theirs = (pd.read_csv(place / "tables.csv") for place in (tmp_path, folder))
    pd.testing.assert_frame_equal(ours, theirs, rtol=1e-4)
    assert drawn(folder) == drawn(tmp_path)


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_recorded_run_is_named_by_its_settings_and_found_by_its_grid(folder):
    """However defaults change: otherwise nothing that was recorded would be found again."""
    manifest, rows = read_record(folder)
    asked = {run.name: run.config for run in read_grid(manifest.grid, manifest.scale).runs}
    for row in rows:
        stored = row.outcome.config
        assert stored.name == row.name
        assert asked[row.name].name == row.name
        assert asked[row.name].differences(stored) == []


def drawn(folder):
    return {path.name: set(re.findall(r' id="f([0-9a-f]{8})-', path.read_text())) for path in folder.glob("*.svg")}
