"""Loss against the cache: bytes that are counted, pairs of runs, their table and picture."""

from itertools import product

import pandas as pd
import pytest

from kvt.grids.cache import cache_bytes, costs, costs_table, draw_costs
from kvt.study.grid import read_grid

TINY = {"qkv": 1024, "qkv, kv_heads 2": 512, "qkv, kv_heads 1": 256, "q-kv": 512, "q-kv, kv_heads 2": 256, "k": 512}
TINY |= {"mla": 256, "mla, rank 128": 512, "qkv, share_layers 2": 512, "q-kv, share_layers 2": 256}
"""Numbers of one layer of 128 channels and four heads in the cache, times four bytes each, or their mean."""


def test_caches_are_counted_with_what_layers_share():
    found = {run.attention: cache_bytes(run) for run in read_grid("cache", "laptop").runs}
    assert found == {attention: 4 * of_a_layer for attention, of_a_layer in TINY.items()}


@pytest.fixture
def runs():
    cells = product(("qkv", "mla, rank 4"), ("size=tiny", "size=small"), (0, 1, 2))
    table = pd.DataFrame(cells, columns=["attention", "setting", "seed"]).assign(task="text")
    table["cache"] = table.attention.map({"qkv": 4096, "mla, rank 4": 64})
    noise = table.seed * table.setting.map({"size=tiny": 1, "size=small": 2})  # of both of a pair
    table["val/loss"] = 2 + noise + (table.attention != "qkv") * (0.5 + table.seed / 10)
    return table


def test_each_run_is_compared_with_that_of_its_settings_and_seed(runs):
    found = costs(runs, "qkv")
    shared = found[found.attention != "qkv"]
    assert shared.difference.tolist() == pytest.approx([0.6, 0.6])
    assert shared.reach.tolist() == pytest.approx([4.303 * 0.1 / 3**0.5] * 2, rel=1e-3)
    assert found[found.attention == "qkv"].difference.isna().all()
    lines = str(costs_table(found, "qkv")).splitlines()
    assert lines[0] == "|  |  | cache B/token | loss | above QKV | n |"
    assert lines[3] == "| size=tiny | MLA, rank 4 | 64 | 3.600 | +0.600 ± 0.248 | 3 |"


def test_the_picture_has_a_panel_for_each_setting(runs):
    panels = draw_costs(costs(runs, "qkv"), "qkv").axes
    assert [axes.get_title(loc="left") for axes in panels] == ["size=tiny", "size=small"]
