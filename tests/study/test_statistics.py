"""The statistics, by what they must satisfy and by cases that can be counted on fingers."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvt.study.statistics import compare, holm, summarise, verdict

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
    for count in (1, 2):
        few = compare(series(*[1] * count), series(*[0] * count), pd.Series(list("ab")[:count]), 5)
        assert few.difference == 1
        assert np.isnan([few.different, few.equal]).all()
        assert verdict(few.difference, few.different, few.equal, True) == "too few runs"


def test_settings_are_compared_and_not_runs():
    """Repeating each setting's seeds is no news about other settings: interval and tests stay what they were."""
    differences = RNG.normal(size=8)
    zeros = pd.Series(np.zeros(40))
    once = compare(pd.Series(differences), zeros[:8], pd.Series(range(8)), 0.5)
    often = compare(pd.Series(np.repeat(differences, 5)), zeros, pd.Series(np.repeat(range(8), 5)), 0.5)
    assert often[:5] == pytest.approx(once[:5])
    assert (often.pairs, often.settings, once.pairs) == (40, 8, 8)
    assert once.low < once.difference < once.high


def test_a_setting_with_many_seeds_counts_once():
    found = compare(series(1, 1, 1, 4), series(0, 0, 0, 0), pd.Series(list("aaab")), 1)
    assert found.difference == 2.5


def test_seeds_are_compared_where_there_is_one_setting():
    values = series(0.1, 0.2, 0.4, 0.3)
    found = compare(values, values * 0, pd.Series(["a"] * 4), 1)
    assert found.different == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert (found.pairs, found.settings) == (4, 1)


def test_which_is_taken_from_which():
    ours, settings = series(1, 2, 3, 5), pd.Series(list("abcd"))
    above, below = compare(ours, ours * 0, settings, 1), compare(ours * 0, ours, settings, 1)
    assert above.difference == -below.difference > 0
    assert (above.different, above.equal) == pytest.approx((below.different, below.equal))
    assert (above.low, above.high) == pytest.approx((-below.high, -below.low), abs=0.1)


def test_differences_without_any_spread():
    settings = pd.Series(list("abc"))
    same = compare(series(1, 2, 3), series(1, 2, 3), settings, 0.01)
    assert (same.difference, same.low, same.high, same.different, same.equal) == (0, 0, 0, 1, 0)
    beyond = compare(series(2, 2, 2), series(0, 0, 0), settings, 1)
    assert (beyond.different, beyond.equal) == (0, 1)


def test_equal_is_what_lies_within_the_margin():
    """Two one-sided tests at 5 % are a 90 % interval within the margin."""
    values, settings = pd.Series(RNG.normal(0.2, 0.3, 10)), pd.Series(range(10))
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.90)
    reach = max(-interval.low, interval.high)
    assert compare(values, values * 0, settings, reach * 1.001).equal < 0.05
    assert compare(values, values * 0, settings, reach * 0.999).equal > 0.05


def test_the_interval_covers_what_it_should():
    """Of 200 samples of 12 settings about 95 % contain the truth; a percentile bootstrap is a little short."""
    truth = 0.3
    samples = RNG.normal(truth, 1, (200, 12))
    zeros, settings = pd.Series(np.zeros(12)), pd.Series(range(12))
    covered = [(c := compare(pd.Series(sample), zeros, settings, 1)).low <= truth <= c.high for sample in samples]
    assert 0.86 < np.mean(covered) < 0.99


@pytest.mark.parametrize(("settings", "seeds"), [(3, 3), (8, 3), (1, 5)])
def test_false_claims_are_as_rare_as_they_should_be(settings, seeds):
    """Settings differ by chance, and on average not at all: 5 % are called different; at the margin, 5 % equal."""
    labels = pd.Series(np.repeat(range(settings), seeds))
    spread = 1.0 if settings > 1 else 0.0
    different = equal = 0
    for _ in range(600):
        effect = np.repeat(RNG.normal(0, spread, settings), seeds) + RNG.normal(0, 0.3, settings * seeds)
        zeros = pd.Series(np.zeros(len(labels)))
        different += compare(pd.Series(effect), zeros, labels, 1).different < 0.05
        equal += compare(pd.Series(effect + 1), zeros, labels, 1).equal < 0.05
    assert 0.02 < different / 600 < 0.085
    assert equal / 600 < 0.085


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
    ("difference", "different", "equal", "more_is_better", "expected"),
    [
        (0, 1, 0, True, "as good"),
        (0.5, 0.001, 0.01, True, "as good"),  # different, and not by the margin
        (0.7, 0.001, 0.2, True, "better"),
        (0.7, 0.001, 0.2, False, "worse"),
        (-2.5, 0.04, 1, True, "worse"),
        (-2.5, 0.06, 1, True, "undecided"),
        (0, 0.9, 0.3, True, "undecided"),
        (1, float("nan"), float("nan"), True, "too few runs"),
    ],
)
def test_verdicts(difference, different, equal, more_is_better, expected):
    assert verdict(difference, different, equal, more_is_better) == expected
