"""The statistics: properties that they must have, and cases computed by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from kvt.reports.statistics import Comparison, Spread, compare, compare_shares, holm, summarise, verdict
from tests.conftest import REPOSITORY

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
    assert (
        compare(series(1, 1, 1, 4), series(0, 0, 0, 0), pd.Series(list("aaab")), series(0, 1, 2, 0)).difference == 2.5
    )


def test_what_cannot_be_known_is_nan():
    one = summarise(series(0.5), pd.Series(["a"]))
    assert one.mean == 0.5
    assert np.isnan([one.over_settings, one.over_seeds]).all()
    assert np.isnan(summarise(series(), pd.Series([], dtype=str)).mean)
    for settings, seeds in (("a", [0]), ("ab", [0, 0]), ("aa", [0, 1])):
        few = compared([1.0] * len(settings), settings, seeds)
        assert few.difference == 1
        assert np.isnan([*few.interval, *few.interval_beyond, few.different, few.equal(5)]).all()
        assert verdict(1, few.different, few.equal(5), True) == "too few runs"
    assert np.isnan(compared(RNG.normal(size=20), "ab" * 10, np.arange(20) // 2).beyond.error), "of two settings"


def compared(differences, settings, seeds):
    return compare(pd.Series(differences), pd.Series(np.zeros(len(seeds))), pd.Series([*settings]), pd.Series([*seeds]))


@pytest.mark.parametrize(("settings", "seeds"), [(8, 1), (1, 4)])
def test_one_seed_is_a_sample_of_settings_and_one_setting_of_seeds(settings, seeds):
    sample = RNG.normal(0.2, 0.3, settings * seeds)
    found = compared(sample, np.arange(settings).repeat(seeds), np.tile(np.arange(seeds), settings))
    expected = stats.ttest_1samp(sample, 0)
    ends = ((-0.5, "greater"), (0.5, "less"))
    one_sided = [stats.ttest_1samp(sample, end, alternative=way).pvalue for end, way in ends]
    assert found.difference == pytest.approx(sample.mean())
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert found.different == pytest.approx(expected.pvalue)
    assert found.equal(0.5) == pytest.approx(min(1, 2 * max(one_sided)))
    assert (found.pairs, found.settings, found.seeds) == (settings * seeds, settings, seeds)


def table_of(settings, seeds, together=0.0, rng=None):
    """Differences of settings far apart, with noise of pairs, and of seeds that move all settings together."""
    rng = rng or np.random.default_rng(0)  # the same whichever tests have run before
    level, noise = 10.0 * np.arange(settings)[:, None], rng.normal(size=(settings, seeds))
    return level + noise + together * rng.normal(size=seeds)


def of_table(differences):
    settings, seeds = differences.shape
    places = np.arange(settings).repeat(seeds), np.tile(np.arange(seeds), settings)
    return compared(differences.ravel(), *places)


def test_settings_are_those_of_the_grid_and_no_sample():
    """How far they are apart is no error: only seeds are drawn. Beyond the grid it is."""
    far, near = table_of(5, 4), RNG.normal(size=4)
    shifted = far + near.mean() + 100 * np.arange(5)[:, None]
    assert of_table(shifted).spread.error == pytest.approx(of_table(far).spread.error)
    assert of_table(shifted).beyond.error > 10 * of_table(far).spread.error
    within = far - far.mean(axis=1, keepdims=True)
    spreads = Spread(np.sqrt((within**2).sum() / 15 / 20), 15), Spread(stats.sem(far.mean(axis=0)), 3)
    assert of_table(far).spread == pytest.approx(max(spreads, key=lambda spread: spread.reach))


def test_seeds_that_move_all_settings_together_are_fewer_than_their_pairs():
    lost = table_of(8, 4) + 5 * np.array([-1.2, -0.4, 0.4, 1.2])
    found = of_table(lost)
    assert found.spread.error > 1.5, "four seeds of deviation 5 are known to ± 2.5, 32 pairs would be to ± 0.9"
    places = np.arange(8).repeat(4)[3:], np.tile(np.arange(4), 8)[3:]  # one setting has but one seed
    assert 1 < compared(lost.ravel()[3:], *places).spread.error < 6


RATIOS = (1.0, 2.5, 5.0, 10.0)
SEEDS = {
    "4 × 2": [2] * 4,
    "4 × 3": [3] * 4,
    "12 × 3": [3] * 12,
    "8 × 5": [5] * 8,
    "6 × 3 and 2 × 6": [3] * 6 + [6] * 2,
    "6 × 3 and 4 × 2": [3] * 6 + [2] * 4,
    "4 × 3 and 2 × 1": [3] * 4 + [1] * 2,
}
"""The seeds of each setting, by the name of a row in docs/reliability.md."""


def test_an_interval_of_seeds_contains_the_truth_as_often_as_it_says():
    """Where a seed moves all settings together, too."""
    assert coverage(SEEDS["12 × 3"], 10.0) > 0.94 - 2 * ERROR


@pytest.mark.slow
@pytest.mark.parametrize("words", SEEDS)
def test_the_coverage_in_the_docs_is_the_simulated_one(words):
    found = [coverage(SEEDS[words], ratio) for ratio in RATIOS]
    is_balanced = len({*SEEDS[words]}) == 1
    assert min(found) > (0.94 if is_balanced else 0.93) - ERROR
    row = f"| {words} | " + " | ".join(f"{100 * share:.0f}" for share in found) + " |"
    assert row in (REPOSITORY / "docs" / "reliability.md").read_text()


ERROR = (0.95 * 0.05 / 1000) ** 0.5  # the standard error of a coverage


def coverage(seeds, ratio):
    """Return how often, of 1,000 tables, the interval has the truth, given each setting's number of seeds."""
    settings, rng = len(seeds), np.random.default_rng(0)
    setting, seed = np.repeat(np.arange(settings), seeds), np.concatenate([*map(np.arange, seeds)])
    held, together = [], ((ratio - 1) / settings) ** 0.5
    for _ in range(1000):
        sample = 10.0 * setting + rng.normal(size=len(seed)) + together * rng.normal(size=max(seeds))[seed]
        low, high = compared(sample, setting, seed).interval
        held.append(low <= 5.0 * (settings - 1) <= high)
    return np.mean(held)


def test_degrees_of_freedom_are_those_of_the_wider_interval():
    """Four seeds that move eight settings together have three, whatever the number of pairs."""
    lost = table_of(8, 4) + 5 * np.array([-1.2, -0.4, 0.4, 1.2])
    assert of_table(lost).spread == pytest.approx((stats.sem(lost.mean(axis=0)), 3))
    alone = np.arange(3)[:, None] + np.array([[1.0, -1, 0], [0, 1, -1], [-1, 0, 1]])  # seeds have equal means
    assert of_table(alone).spread == pytest.approx((1 / 3, 6))


def test_a_seed_of_one_setting_alone_hardly_counts():
    """Then the sample is one of settings, as with a single seed."""
    few = compared(RNG.normal(size=7), "aaabcde", [0, 1, 2, 0, 0, 0, 0])
    assert few.spread.freedom == 4


def test_what_is_beyond_the_grid_is_never_surer_than_what_is_in_it():
    rng = np.random.default_rng(0)
    for _ in range(50):
        found = of_table(table_of(5, 3, rng=rng))
        (low, high), (wide_low, wide_high) = found.interval, found.interval_beyond
        assert wide_low < low < high < wide_high


def test_differences_without_any_spread():
    same, gone = (compared([0.0] * 6, "aabbcc", [0, 1] * 3), compared([2.0] * 6, "aabbcc", [0, 1] * 3))
    assert (same.difference, *same.interval, same.different, same.equal(0.01)) == (0, 0, 0, 1, 0)
    assert same.interval_beyond == (0, 0)
    assert (*gone.interval, gone.different, gone.equal(1), gone.equal(2)) == (2, 2, 0, 1, 1)


def test_solved_runs_are_compared_by_the_pairs_of_which_one_alone_is():
    for both, ours, theirs, neither in product((0, 3), (0, 1, 6), (0, 2), (0, 4)):
        if not both + ours + theirs + neither:
            continue
        counts = ([1] * both + [1] * ours + [0] * theirs + [0] * neither, [1] * both + [0] * ours + [1] * theirs)
        found = compare_shares(pd.Series(counts[0]), pd.Series(counts[1] + [0] * neither))
        assert found[:3] == (both + ours, both + theirs, both + ours + theirs + neither)
        p = min(1, 2 * stats.binom.cdf(min(ours, theirs), ours + theirs, 0.5)) if ours + theirs else 1
        assert found.different == pytest.approx(p)


def test_by_holms_method_a_family_without_any_effect_has_a_significant_p_one_time_in_twenty():
    p = pd.Series([0.01, np.nan, 0.04, 0.03])
    assert holm(p).tolist() == pytest.approx([0.03, np.nan, 0.06, 0.06], nan_ok=True)
    assert holm(pd.Series([], dtype=float)).empty
    rng = np.random.default_rng(0)
    found = np.mean([holm(pd.Series(rng.uniform(size=10))).min() < 0.05 for _ in range(2000)])
    assert 0.035 < found < 0.065


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 8, 12))])
def test_an_interval_contains_the_truth_as_often_as_it_says(size):
    """Less often with skewed differences, as docs/reliability.md says, at any of these numbers of seeds."""
    assert 0.92 < covered(size, lambda rng: rng.normal(0.3, 2, size), 0.3) < 0.98
    assert 0.84 < covered(size, lambda rng: rng.exponential(size=size), 1) < 0.93


def covered(size, draw, truth):
    """How often, of 500 samples of seeds of one setting."""
    rng = np.random.default_rng(size)
    intervals = [compared(draw(rng), "a" * size, range(size)).interval for _ in range(500)]
    return np.mean([low <= truth <= high for low, high in intervals])


@given(st.floats(-3, 3), st.floats(0, 2), st.integers(2, 40), st.floats(0.01, 3), st.sampled_from(["more", "less"]))
def test_interval_tests_and_verdict_never_contradict(difference, error, freedom, margin, better):
    assume(not difference or abs(difference) > 1e-9)  # no score differs by less
    found = Comparison(difference, Spread(error, freedom), Spread(), 9, 9, 9)
    (low, high), different, equal = found.interval, found.different, found.equal(margin)
    assume(min(abs(p - 0.05) for p in (different, equal)) > 1e-9)  # where rounding decides
    assert (different < 0.05) == (not low <= 0 <= high)
    assert (equal < 0.05) == (-margin < low <= high < margin)
    judged = verdict(difference, different, equal, better)
    assert (judged == "as good") == (equal < 0.05)
    assert (judged in ("better", "worse")) == (different < 0.05 <= equal)
    if judged in ("better", "worse"):
        assert (judged == "better") == ((difference > 0) == (better == "more"))


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
