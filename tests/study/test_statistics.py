"""The statistics, by what they must satisfy and by cases that can be counted on fingers."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvt.study.statistics import Comparison, compare, holm, summarise, verdict

RNG = np.random.default_rng(0)


def series(*values):
    return pd.Series(values, dtype=float)


def test_a_mean_is_over_settings_not_over_runs():
    """Setting a has three seeds, b one: each counts once."""
    cell = summarise(series(1, 2, 3, 6), pd.Series(["a", "a", "a", "b"]))
    assert cell.mean == (2 + 6) / 2
    assert cell.over_settings == pytest.approx(np.std([2, 6], ddof=1))
    assert cell.over_seeds == pytest.approx(1)
    assert (cell.runs, cell.settings) == (4, 2)


def test_spread_over_seeds_is_pooled_over_settings():
    cell = summarise(series(0, 2, 10, 10), pd.Series(["a", "a", "b", "b"]))
    assert cell.over_seeds == pytest.approx(np.sqrt((2 + 0) / 2))


def test_what_cannot_be_known_is_nan():
    one = summarise(series(0.5), pd.Series(["a"]))
    assert one.mean == 0.5
    assert np.isnan([one.over_settings, one.over_seeds]).all()
    assert np.isnan(summarise(series(), pd.Series([], dtype=str)).mean)
    single = compare(series(1), series(0), pd.Series(["a"]))
    assert single.difference == 1
    assert np.isnan([single.low, single.high, single.p]).all()
    assert verdict(single, single.p, 1, True) == "too few runs"


def test_all_signs_alike_is_the_least_likely_outcome():
    """Of the 2⁶ ways to set six signs two are as extreme as all alike: p = 2 / 64."""
    ours = series(1, 2, 3, 4, 5, 6)
    found = compare(ours, ours * 0, pd.Series(list("abcdef")))
    assert found.p == pytest.approx(2 / 64)
    assert found.difference == 3.5
    assert compare(ours * 0, ours, pd.Series(list("abcdef"))).p == found.p


def test_no_difference_is_no_news():
    same = compare(series(1, 2, 3), series(1, 2, 3), pd.Series(list("abc")))
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert verdict(same, same.p, 0.01, True) == "as good"


def test_the_interval_is_over_settings():
    """Repeating each setting's seeds is no news about other settings: the interval stays what it was."""
    differences = RNG.normal(size=8)
    once = compare(pd.Series(differences), pd.Series(np.zeros(8)), pd.Series(range(8)))
    often = compare(pd.Series(np.repeat(differences, 5)), pd.Series(np.zeros(40)), pd.Series(np.repeat(range(8), 5)))
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert often.pairs == 40
    assert once.low < once.inner[0] < once.difference < once.inner[1] < once.high


def test_the_interval_covers_what_it_should():
    """Of 200 samples of 12 settings about 95 % contain the truth; a percentile bootstrap is a little short."""
    truth = 0.3
    samples = RNG.normal(truth, 1, (200, 12))
    zeros, settings = pd.Series(np.zeros(12)), pd.Series(range(12))
    covered = [(c := compare(pd.Series(sample), zeros, settings)).low <= truth <= c.high for sample in samples]
    assert 0.86 < np.mean(covered) < 0.99


def test_under_no_effect_p_is_uniform():
    """Whichever attention a model has makes no difference: 5 % of the tests say p < 5 %."""
    noise = RNG.normal(size=(200, 12))
    zeros, settings = pd.Series(np.zeros(12)), pd.Series(range(12))
    p = [compare(pd.Series(sample), zeros, settings).p for sample in noise]
    assert stats.kstest(p, "uniform").pvalue > 0.01


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm(p):
    """The smallest p is multiplied by their number; the order stays; nothing falls; one test needs no correction."""
    corrected = holm(p)
    assert min(corrected) == pytest.approx(min(1, min(p) * len(p)))
    assert all(a <= b <= 1 for a, b in zip(p, corrected, strict=True))
    assert [corrected[i] for i in np.argsort(p, kind="stable")] == sorted(corrected)
    assert holm(p[:1]) == p[:1]


def test_holm_leaves_out_what_was_not_tested():
    assert np.allclose(holm([0.01, np.nan, 0.03]), [0.02, np.nan, 0.03], equal_nan=True)


@pytest.mark.parametrize(
    ("inner", "difference", "p", "more_is_better", "expected"),
    [
        ((-0.5, 0.5), 0, 1, True, "as good"),
        ((0.2, 0.8), 0.5, 0.001, True, "as good"),  # different, and not by a point
        ((0.2, 1.2), 0.7, 0.001, True, "better"),
        ((0.2, 1.2), 0.7, 0.001, False, "worse"),
        ((-3, -2), -2.5, 0.04, True, "worse"),
        ((-3, -2), -2.5, 0.06, True, "undecided"),
        ((-3, 2), 0, 0.9, True, "undecided"),
    ],
)
def test_verdicts(inner, difference, p, more_is_better, expected):
    numbers = Comparison(difference, *inner, inner, p, 12, 6)
    assert verdict(numbers, p, 1, more_is_better) == expected
