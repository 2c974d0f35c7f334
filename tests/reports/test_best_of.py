"""The best of a small sweep is chosen in validation, and only there."""

import pytest
import yaml

from kvt.reports.figures import against
from kvt.reports.report import best_of
from kvt.reports.tables import tables_of
from kvt.study.grid import read_grid
from kvt.study.outcomes import Outcome, State, table_of_results

GRID = {
    "tasks": ["reverse"],
    "axes": {"lr": [0.1, 0.2, 0.3], "dim": [16, 32], "heads": 2, "attn": ["qkv", "kv"]},
    "seeds": [0, 1],
    "best_of": "lr",
    "against": {"width": "dim", "places back": "test/acc_*_back"},
}


@pytest.fixture
def grid(tmp_path):
    def read(**changes):
        (tmp_path / "swept.yaml").write_text(yaml.safe_dump(GRID | changes))
        return read_grid(tmp_path / "swept.yaml")

    return read


def finished(val: float, test: float) -> list[Outcome]:
    return [Outcome(State.FINISHED, "", {"val/acc": val, "test/acc": test})]


def test_validation_chooses_and_the_setting_tells_runs_apart_no_longer(grid):
    """In test, the order is the other way round."""
    swept = grid()
    outcomes = {run.name: finished(val=-abs(run.value("lr") - 0.2), test=run.value("lr")) for run in swept.runs}
    chosen, text = best_of(swept, outcomes)
    assert len(swept.runs) == 24
    assert len(chosen.runs) == 8
    assert {run.value("lr") for run in chosen.runs} == {0.2}
    assert {run.name for run in chosen.runs} < {run.name for run in swept.runs}
    results = table_of_results(chosen, outcomes)
    assert "lr" not in results
    assert results.groupby(["setting", "seed"]).size().unique().tolist() == [2], "attentions are paired"
    assert "3 runs finished, with lr from 0.1, 0.2, 0.3" in str(text)
    assert "validation metric: 8 of 24 runs." in str(text)


def test_each_cell_chooses_for_itself_among_what_has_finished(grid):
    swept = grid()
    best = {("qkv", 16): 0.1, ("qkv", 32): 0.2, ("kv", 16): 0.3, ("kv", 32): 0.1}
    outcomes = {
        run.name: finished(val=run.value("lr") == best[run.attention, run.value("dim")], test=0.0) for run in swept.runs
    }
    lost = next(run for run in swept.runs if (run.attention, run.value("dim"), run.seed) == ("kv", 32, 1))
    outcomes |= {run.name: [Outcome(State.FAILED)] for run in swept.runs if run.setting == lost.setting and run.seed}
    chosen, text = best_of(swept, outcomes)
    for run in chosen.runs:
        failed = run.value("dim") == 32 and run.seed == 1 and best[run.attention, 32] == lost.value("lr")
        assert failed or run.value("lr") == best[run.attention, run.value("dim")]
    assert "2 to 3 runs finished" in str(text)
    nothing, _ = best_of(swept, {})
    assert len(nothing.runs) == 8
    _, text = best_of(swept, {run.name: outcomes[run.name] for run in swept.runs if run.attention == "qkv"})
    assert "0 to" not in str(text), "a cell that nobody has run yet is not shown"
    assert "metric: 4 of " in str(text)


def test_a_grid_without_a_sweep_is_as_it_was(grid):
    plain = grid(best_of=None)
    assert best_of(plain, {}) == (plain, None)


def test_a_line_joins_the_means_over_runs(grid):
    chosen, _ = best_of(swept := grid(), outcomes := {})
    outcomes |= {
        run.name: finished(val=run.value("lr"), test=run.value("dim") / 64 + run.seed / 8) for run in swept.runs
    }
    chosen, _ = best_of(swept, outcomes)
    (table,) = tables_of(chosen)
    (axes,) = against(table_of_results(chosen, outcomes), table, "dim", "width").axes
    qkv, kv, chance = axes.lines
    for line in (qkv, kv):
        assert line.get_xydata().tolist() == [[16, 0.3125], [32, 0.5625]]
    assert set(chance.get_ydata()) == {0.1}
    assert against(table_of_results(chosen, {}), table, "dim", "width") is None


def test_metrics_are_drawn_against_the_number_in_their_names(grid):
    """One run lacks a number; its line goes on."""
    chosen, _ = best_of(swept := grid(), {})
    outcomes = {run.name: finished(val=run.value("lr"), test=0.5) for run in swept.runs}
    for run in swept.runs:
        distances = (1, 16) if run.seed else (1, 2, 16)
        outcomes[run.name][0].result.update({f"test/acc_{n}_back": (n + run.seed) / 32 for n in distances})
    chosen, _ = best_of(swept, outcomes)
    (table,) = tables_of(chosen)
    (axes,) = against(table_of_results(chosen, outcomes), table, "test/acc_*_back", "places back").axes
    for line in axes.lines[:2]:
        assert line.get_xydata().tolist() == [[1, 1.5 / 32], [2, 2 / 32], [16, 16.5 / 32]]
    assert axes.get_xlabel() == "places back"
    assert against(table_of_results(chosen, outcomes), table, "test/acc_*_forward", "places") is None
