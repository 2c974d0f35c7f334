"""Hostile results and histories of a study's runs: one is listed as damaged, or as what it says, and stops nothing."""

import shutil
from pathlib import Path

import pandas as pd
from hypothesis import strategies as st

from kvt.cli.main import execute
from tests.helpers.drivers import RESULT
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, spoiled
from tests.study.test_damaged import METRICS, grid, leave
from tests.study.test_hostile_grids import VALUES

__all__ = ["grid"]  # a fixture

MORE = {"fleet": 2, "notes": {"bleu": "13a"}, "train/seconds": 2.0}


@fuzz(
    0.06,
    result=spoiled(RESULT | METRICS | MORE, VALUES) | st.just(RESULT | METRICS),
    history=CUT | FLIP | FILL | REPLACE | st.just(None),
)
def test_study_folders(held, grid, result, history):
    folder = leave(grid.runs[0].folder(Path("runs")), result)
    if history:
        history(folder / "history.csv")
    words = ["tiny.yaml", "--folder", "runs"]
    assert held(lambda: execute("study run", [*words, "--list"])) is None
    assert held(lambda: execute("study report", [*words, "--out", "report"])) is None
    spoilt, sound = pd.read_csv("report/results.csv").state
    assert spoilt in ("finished", "diverged", "damaged")
    assert sound == "finished"
    shutil.rmtree("report")
    shutil.rmtree(folder)
