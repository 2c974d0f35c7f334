"""What counting padding hides: pairs of runs, their table and picture."""

from itertools import product

import pandas as pd
import pytest

from kvt.grids.padding import COUNTED, REAL, costs_table, draw_costs, perplexity_costs


@pytest.fixture
def results():
    """Padding has no loss: with half of it, the perplexity over all targets is the root of that over the real ones."""
    cells = product(("qkv", "kv", "k, kv_heads 1"), (0.0, 0.5), (0, 1))
    table = pd.DataFrame(cells, columns=["attention", "val/padding", "seed"]).assign(task="text")
    table["setting"] = table["val/padding"].map("padding={}".format)
    table[REAL] = table.attention.map({"qkv": 16.0, "kv": 25.0, "k, kv_heads 1": 36.0})
    table[COUNTED] = table[REAL] ** (1 - table["val/padding"])
    return table


def test_each_run_is_compared_with_that_of_its_settings_and_seed(results):
    pairs = perplexity_costs(results, "qkv")
    assert len(pairs) == 2 * 2 * 2
    kv = pairs[pairs.attention == "kv"]
    assert kv[REAL].tolist() == [25 / 16 - 1] * 4
    assert sorted(kv[COUNTED]) == [5 / 4 - 1] * 2 + [25 / 16 - 1] * 2
    assert not len(perplexity_costs(results[results.attention != "qkv"], "qkv"))  # none stands in for it
    unfinished = results.assign(**{REAL: results[REAL].where(results.index > 0)})  # of qkv, whose pairs are gone
    assert len(perplexity_costs(unfinished, "qkv")) == 2 * 2 * 2 - 2


def test_the_table_has_both_and_one_where_they_are_the_same(results):
    lines = str(costs_table(perplexity_costs(results, "qkv"))).splitlines()
    assert lines[0] == "|  | no padding | 50% padding: all / real |"
    assert lines[2] == "| **KV** | +56.2, n = 2 | +25.0 / +56.2, n = 2 |"
    assert lines[3].startswith("| **Q=K=V, kv_heads 1** | +125.0, n = 2 | +50.0 / +125.0")


def test_the_picture_has_each_pair_over_all_targets_and_over_the_real_ones(results):
    pairs = perplexity_costs(results, "qkv")
    (axes,) = draw_costs(pairs, "qkv").axes
    drawn = [value for line in axes.lines[1:] for value in line.get_ydata()]
    assert sorted(drawn) == pytest.approx(sorted([*100 * pairs[COUNTED], *100 * pairs[REAL]]))
