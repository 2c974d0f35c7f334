"""The reports in docs/results say what their own results.csv says."""

import sys

import pytest

from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in RESULTS.glob("*/report.md")), ids=lambda path: path.name
)
def test_a_committed_report_is_what_its_runs_give(folder, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    monkeypatch.delitem(sys.modules, "remake", raising=False)
    from remake import remake

    text, pictures = remake(folder)
    assert text == (folder / "report.md").read_text(encoding="utf-8")
    assert all((folder / name).is_file() for name in pictures)
