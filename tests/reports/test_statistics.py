"""The statistics: properties that they must have, and cases computed by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from kvt.reports.statistics import Comparison, compare, summarise, verdict

RNG = np.random.default_rng(0)


def series(*values):
    return pd.Series(values, dtype=float)


def test_a_mean_is_over_settings_and_the_spread_over_seeds_pooled():
    """Setting a has three seeds, b one: each counts once."""
    cell = summarise(series(1, 2, 3, 6), pd.Series(["a", "a", "a", "b"]))
    assert cell.mean == (2 + 6) / 2
    assert cell.over_settings == pytest.approx(np.std([2, 6], ddof=1))
    assert cell.over_seeds == pytest.approx(1)
    assert (cell.runs, cell.settings) == (4, 2)
    cell = summarise(series(0, 2, 10, 10), pd.Series(["a", "a", "b", "b"]))
    assert cell.over_seeds == pytest.approx(np.sqrt((2 + 0) / 2))
    cell = summarise(series(0, 2, 9, 10, 11), pd.Series(list("aabbb")))  # a variance of 2 by one difference, 1 by two
    assert cell.over_seeds == pytest.approx(np.sqrt((1 * 2 + 2 * 1) / 3))
    assert compare(series(1, 1, 1, 4), series(0, 0, 0, 0), pd.Series(list("aaab"))).difference == 2.5


def test_what_cannot_be_known_is_nan():
    one = summarise(series(0.5), pd.Series(["a"]))
    assert one.mean == 0.5
    assert np.isnan([one.over_settings, one.over_seeds]).all()
    assert np.isnan(summarise(series(), pd.Series([], dtype=str)).mean)
    for count in (1, 2):
        few = compare(series(*[1] * count), series(*[0] * count), pd.Series(list("ab")[:count]))
        assert few.difference == 1
        assert np.isnan([*few.interval(), few.different(), few.equal(5)]).all()
        assert verdict(*few.interval(), 5, True) == "too few runs"
    many_seeds = compare(pd.Series(RNG.normal(size=20)), pd.Series(np.zeros(20)), pd.Series(["a", "b"] * 10))
    assert (many_seeds.settings, many_seeds.pairs) == (2, 20)
    assert np.isnan([*many_seeds.interval(), many_seeds.different(), many_seeds.equal(5)]).all()


@pytest.mark.parametrize(("settings", "seeds"), [(8, 1), (8, 5), (1, 4)])
def test_settings_are_compared_and_not_runs_or_the_seeds_of_a_single_one(settings, seeds):
    """Repeating each setting's seeds is no news about other settings: interval and tests stay what they were."""
    sample = RNG.normal(0.2, 0.3, settings if settings > 1 else seeds)
    differences = pd.Series(sample.repeat(settings * seeds // len(sample)))
    found = compare(differences, differences * 0, pd.Series(np.arange(settings).repeat(seeds)))
    expected = stats.ttest_1samp(sample, 0)
    ends = ((-0.5, "greater"), (0.5, "less"))
    one_sided = [stats.ttest_1samp(sample, end, alternative=way).pvalue for end, way in ends]
    assert found.difference == pytest.approx(sample.mean())
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert found.different() == pytest.approx(expected.pvalue)
    assert found.equal(0.5) == pytest.approx(min(1, 2 * max(one_sided)))
    assert (found.pairs, found.settings) == (settings * seeds, settings)


def test_differences_without_any_spread():
    settings = pd.Series(list("abc"))
    same = compare(series(1, 2, 3), series(1, 2, 3), settings)
    assert (same.difference, *same.interval(4), same.different(4), same.equal(0.01, 4)) == (0, 0, 0, 1, 0)
    beyond = compare(series(2, 2, 2), series(0, 0, 0), settings)
    assert (*beyond.interval(), beyond.different(), beyond.equal(1), beyond.equal(2)) == (2, 2, 0, 1, 1)


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 8, 12))])
def test_an_interval_contains_the_truth_as_often_as_it_says(size):
    """Less often with skewed differences, as docs/reliability.md says, at any of these numbers of settings."""
    assert 0.92 < covered(size, lambda rng: rng.normal(0.3, 2, size), 0.3) < 0.98
    assert 0.84 < covered(size, lambda rng: rng.exponential(size=size), 1) < 0.93


def covered(size, draw, truth):
    """How often, of 500 samples."""
    rng = np.random.default_rng(size)
    zeros, settings = pd.Series(np.zeros(size)), pd.Series(range(size))
    intervals = [compare(pd.Series(draw(rng)), zeros, settings).interval() for _ in range(500)]
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_all_intervals_of_a_table_contain_their_truths_together(alike):
    """Lines are tested against one baseline, which makes them alike; Bonferroni's correction holds however much."""
    rng = np.random.default_rng(0)
    zeros, settings, together = pd.Series(np.zeros(6)), pd.Series(range(6)), 0
    for _ in range(200):
        lines = alike * rng.normal(size=6) + (1 - alike) * rng.normal(size=(5, 6))
        ends = [compare(pd.Series(line), zeros, settings).interval(5) for line in lines]
        together += all(low <= 0 <= high for low, high in ends)
    assert together / 200 > 0.91


@pytest.mark.slow
def test_skewed_differences_are_covered_together_as_often_as_the_docs_say():
    rng = np.random.default_rng(0)
    zeros, settings, together = pd.Series(np.zeros(6)), pd.Series(range(6)), 0
    for _ in range(400):
        ends = [compare(pd.Series(rng.exponential(size=6)), zeros, settings).interval(4) for _ in range(4)]
        together += all(low <= 1 <= high for low, high in ends)
    assert 0.73 < together / 400 < 0.86


@given(st.floats(-3, 3), st.floats(0, 2), st.integers(3, 40), st.floats(0.01, 3), st.integers(1, 30), st.booleans())
def test_interval_tests_and_verdict_never_contradict(difference, error, values, margin, comparisons, more_is_better):
    assume(not difference or abs(difference) > 1e-9)  # no score differs by less
    found = Comparison(difference, error, values, values, values)
    low, high = found.interval(comparisons)
    different, equal = found.different(comparisons), found.equal(margin, comparisons)
    assume(min(abs(p - 0.05) for p in (different, equal)) > 1e-9)  # where rounding decides
    assert (different < 0.05) == (not low <= 0 <= high)
    assert (equal < 0.05) == (-margin < low <= high < margin)
    judged = verdict(low, high, margin, more_is_better)
    assert (judged == "as good") == (equal < 0.05)
    assert (judged in ("better", "worse")) == (different < 0.05 <= equal)
    if judged in ("better", "worse"):
        assert (judged == "better") == ((difference > 0) == more_is_better)


def test_the_share_of_settings_is_estimated_without_bias_from_the_seeds():
    """Of runs drawn with these variances, many settings give the share; a single setting or seed gives none."""
    rng = np.random.default_rng(0)
    for (of_settings, of_seeds), seeds in product(((1.0, 3.0), (2.0, 2.0), (0.0, 1.0)), ([2, 2], [1, 5])):
        setting = np.repeat(np.arange(4000), 2000 * seeds)
        level = rng.normal(0, of_settings**0.5, 4000)[setting]
        cell = summarise(pd.Series(level + rng.normal(0, of_seeds**0.5, len(level))), pd.Series(setting))
        assert cell.share_of_settings == pytest.approx(of_settings / (of_settings + of_seeds), abs=0.04)
    assert np.isnan(summarise(pd.Series([1.0, 2.0]), pd.Series(["a", "a"])).share_of_settings)
    assert np.isnan(summarise(pd.Series([1.0, 2.0]), pd.Series(["a", "b"])).share_of_settings)
    assert np.isnan(summarise(pd.Series([1.0, 1.0, 1.0, 1.0]), pd.Series(["a", "a", "b", "b"])).share_of_settings)
