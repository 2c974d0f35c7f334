"""A report is a list of sections, which a grid may name, its user's own among them."""

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvt.commands import execute as command
from kvt.reports.report import measure, write_sections
from kvt.study.grid import read_grid
from kvt.system import GRIDS, run
from tests.helpers.drivers import METRICS, RESULT, finish
from tests.study.test_command import TINY

pytestmark = pytest.mark.usefixtures("undrawn")
SLOWEST = """
from kvt.reports.report import Section

def slowest(grid, results):
    runs = results.finished.nlargest(3, "seconds")[["task", "attention", "seconds"]]
    yield Section("The slowest runs", ["Seconds: " + ", ".join(map(str, runs.seconds))], tables=[runs])
"""


@pytest.fixture
def grid(in_tmp_dir):
    """Writes a grid of two runs that names sections; both runs have finished."""

    def write(**keys):
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY | keys))
        for number, one in enumerate(read_grid(Path("tiny.yaml")).runs):
            finish(one, Path("runs"), RESULT | METRICS | {"seconds": 10.0 + number})
        return ["tiny.yaml", "--folder", "runs"]

    return write


@pytest.mark.parametrize("name", [path.stem for path in sorted(GRIDS.glob("*.yaml"))])
def test_a_grid_of_which_no_run_has_finished_has_a_report(name):
    grid, results = measure(read_grid(name, "smoke"), {})
    assert not len(results.finished)
    assert not any(section.figures for section in write_sections(grid, results))


def test_an_own_section_is_in_the_page_and_its_numbers_are_in_the_csv(grid, monkeypatch):
    monkeypatch.syspath_prepend(".")
    words = grid(sections=["tables", "my_sections.slowest", "curves", "notes"])
    Path("my_sections.py").write_text(SLOWEST)
    command("study report", [*words, "--out", "report"])
    text = Path("report/report.md").read_text()
    assert "## The slowest runs\n\nSeconds: 11.0, 10.0\n" in text
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    tables = ["Test accuracy", "How to read the tables"]
    assert headings == [*tables, "The slowest runs", "Curves and bars", "Costs", "Measured on"]
    assert {*pd.read_csv("report/tables.csv").seconds.dropna()} == {10, 11}


def test_a_report_has_the_sections_that_its_grid_names_and_no_others(grid):
    command("study report", [*grid(sections=["notes"]), "--out", "report"])
    text = Path("report/report.md").read_text()
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Costs", "Measured on"]
    assert "2 runs: 2 finished" in text
    assert {path.suffix for path in Path("report").iterdir()} == {".md", ".csv"}


def test_a_section_that_fails_is_named_with_the_traceback_of_its_own_code(grid, monkeypatch, capfd):
    monkeypatch.syspath_prepend(".")
    Path("my_broken.py").write_text("def slowest(grid, results):\n    yield results.finished['hours']\n")
    words = grid(sections=["notes", "my_broken.slowest"])
    with pytest.raises(SystemExit, match="2"):
        run(lambda: command("study report", words))
    told = capfd.readouterr().err
    assert "error: section my_broken.slowest" in told.splitlines()[-1]
    assert 'my_broken.py", line 2, in slowest' in told
    assert "write_report" not in told


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sections": "notes"}, "sections"),
        ({"tables": [{"metrics": "test/acc"}]}, "metrics"),
        ({"sections": ["note"]}, "'notes'"),
        ({"sections": ["nowhere.slowest"]}, "nowhere"),
        ({"sections": ["kvt.reports.sections.LEGEND"]}, "LEGEND"),
        ({"against": {"width": "dimm"}}, "'dim'"),
        ({"best_of": "learning_rate"}, "learning_rate"),
    ],
)
def test_a_mistake_is_told_before_any_run_is_made(grid, keys, named, mistake):
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY | keys))
    assert named in mistake(lambda: run(lambda: command("study run", ["tiny.yaml", "--dry_run"])))
