"""The statistics: an independent implementation, its values on the records, and cases computed by hand."""

from itertools import chain, combinations, product
from math import nan, sqrt

import numpy as np
import pandas as pd
import pytest
import yaml
from claims import CLAIMS, open_record
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from kvt.reports.comparisons import by_seed
from kvt.reports.statistics import Comparison, compare, compare_shares, holm, summarise, verdict
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
    cell = summarise(series(0, 2, 9, 10, 11), pd.Series(list("aabbb")))  # a variance of 2 by one difference, 1 by two
    assert cell.over_seeds == pytest.approx(np.sqrt((1 * 2 + 2 * 1) / 3))
    assert compared([1, 1, 1, 4], "aaab", [0, 1, 2, 0]).difference == 2.5


def test_what_cannot_be_known_is_nan():
    one = summarise(series(0.5), pd.Series(["a"]))
    assert one.mean == 0.5
    assert np.isnan([one.over_settings, one.over_seeds]).all()
    assert np.isnan(summarise(series(), pd.Series([], dtype=str)).mean)
    for settings, seeds in (("a", [0]), ("abcde", [0] * 5), ("ab", [0, 1])):
        few = compared([1.0] * len(settings), settings, seeds)
        assert few.difference == 1
        assert np.isnan([*few.interval, few.different, few.margin]).all()
        assert verdict(1, few.different, few.margin < 5, "more") == "too few seeds"


def compared(differences, settings, seeds):
    return compare(pd.Series(differences), pd.Series(np.zeros(len(seeds))), pd.Series([*settings]), pd.Series([*seeds]))


def by_hand(differences, blocks, rho=0.2):
    """Return mean, standard error and degrees of freedom, given differences by setting and seed, and settings by block.

    The residuals of a setting, its mean over the seeds, and so on, one number after the other.
    """
    mean = sum(sum(of.values()) / len(of) for of in differences.values()) / len(differences)
    weights, parts = [], []
    for settings in blocks.values():
        weights.append(len(settings) / len(differences))
        seeds = set.intersection(*(set(differences[name]) for name in settings))
        z = []
        for seed in seeds:
            residuals = [differences[s][seed] - sum(differences[s].values()) / len(differences[s]) for s in settings]
            z.append(sum(residuals) / len(residuals))
        parts.append((len(z), sum((one - sum(z) / len(z)) ** 2 for one in z) / (len(z) - 1)) if len(z) > 1 else None)
    known = [part[1] for part in parts if part]
    if not known:
        return mean, nan, 1
    effective, total, v = 1 / sum(w**2 for w in weights), 0.0, []
    for weight, part in zip(weights, parts, strict=True):
        total += weight**2 * (part[1] / part[0] if part else sum(known) / len(known))
        v += [(weight**2 * part[1] / part[0], part[0] - 1)] if part else []
    freedom = min(sum(one for one, _ in v) ** 2 / sum(one**2 / n for one, n in v), sum(n for _, n in v))
    return mean, sqrt(total * (1 + rho * (effective - 1))), max(1, freedom / (1 + rho**2 * (effective - 1)))


@pytest.mark.parametrize("number", range(20))
def test_the_procedure_is_that_of_an_independent_implementation(number):
    """With blocks of one to three settings, and seeds missing at random."""
    rng = np.random.default_rng(number)
    blocks = {f"b{b}": [f"n={b} heads={h}" for h in range(rng.integers(1, 4))] for b in range(rng.integers(1, 6))}
    kept = rng.uniform(0.4, 1)
    cells = [(s, r, rng.normal()) for s in chain(*blocks.values()) for r in range(5) if r == 0 or rng.random() < kept]
    by_setting = {setting: {r: d for s, r, d in cells if s == setting} for setting, *_ in cells}
    settings, seeds, d = zip(*cells, strict=True)
    found = compared(d, settings, seeds)
    assert found[:3] == pytest.approx(by_hand(by_setting, blocks), nan_ok=True)
    half = stats.t.ppf(0.975, found.freedom) * found.error
    assert found.interval == pytest.approx((found.difference - half, found.difference + half), nan_ok=True)
    assert (found.pairs, found.settings, found.seeds) == (len(cells), len(by_setting), len({*seeds}))


CHECKS = """
P4 -0.48 -1.26 0.31 0.17, P5 -0.70 -1.16 -0.24 0.011, P7 -0.56 -1.10 -0.01 0.047, P6 -0.26 -1.33 0.80 0.40,
O9 -2.52 -3.55 -1.49 0.009, O34 5.31 1.57 9.06 0.026, P8 6.40 2.80 10.01 0.006, P9 2.82 0.46 5.18 0.029,
P9 7.03 6.67 7.39 0.0000, O10 10.97 10.29 11.66 0.0000, P10 -2.00 -7.03 3.03 0.36, P11 -10.74 -14.05 -7.43 0.0002,
P12 0.20 -9.91 10.32, P13 -0.38 -15.46 14.69, O6 -1.57 -3.34 0.20 0.067, O7 -2.87 -4.17 -1.58 0.0009,
O12 -2.44 -2.90 -1.97 0.0002, O14 -0.17 -0.21 -0.14, O18 5.60 2.34 8.86 0.017, O19 -6.41 -9.13 -3.69 0.0015,
O20 0.69 -1.46 2.85, O22 -5.88 -9.12 -2.64 0.016"""
"""Claim, difference, interval and p before correction, as computed when the procedure was chosen."""


@pytest.mark.slow
@pytest.mark.parametrize("check", [part.split() for part in CHECKS.split(",")], ids="-".join)
def test_the_records_give_the_values_of_the_chosen_procedure(check):
    name, difference, *others = check
    claim = yaml.safe_load(CLAIMS.read_text())["paper" if name[0] == "P" else "ours"][name]["compared"]
    record = claim["record"].replace("figure5-text", "figure5-laptop")  # the procedure was chosen on the older record
    found = [compared_in(record, claim["metric"], claim["column"], *pair) for pair in claim["pairs"]]
    (one,) = (one for one in found if round(one.difference, 2) == float(difference))
    values = [*one.interval, one.different]
    for value, text in zip(values, others, strict=False):
        assert f"{value:.{len(text.partition('.')[2])}f}" == text


def compared_in(*asked):
    points = points_of(*asked)
    return compared(points, points.index.get_level_values("setting"), points.index.get_level_values("seed"))


def points_of(record, metric, column, one, other):
    """The differences of pairs in points, by setting and seed."""
    found = open_record(record)
    table = found.table(metric)
    pairs = by_seed(found.rows, table, column)[1][[one, other]].dropna()
    return (table.kind.scaled(pairs[one]) - table.kind.scaled(pairs[other])) / table.kind.point


def test_a_single_setting_is_a_sample_of_seeds():
    sample = RNG.normal(0.2, 0.3, 4)
    found = compared(sample, "aaaa", range(4))
    expected = stats.ttest_1samp(sample, 0)
    ends = ((-0.5, "greater"), (0.5, "less"))
    one_sided = [stats.ttest_1samp(sample, end, alternative=way).pvalue for end, way in ends]
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert found.different == pytest.approx(expected.pvalue)
    assert (found.margin < 0.5) == (max(one_sided) < 0.05)


def test_settings_are_those_of_the_grid_and_no_sample():
    """How far they are apart is no error: only seeds are drawn."""
    noise = RNG.normal(size=(5, 4))
    places = np.arange(5).repeat(4), np.tile(np.arange(4), 5)
    near, far = (compared((noise + step * np.arange(5)[:, None]).ravel(), *places) for step in (0, 100))
    assert far[1:] == pytest.approx(near[1:])


def test_differences_without_any_spread():
    same, gone = (compared([0.0] * 6, "aabbcc", [0, 1] * 3), compared([2.0] * 6, "aabbcc", [0, 1] * 3))
    assert (same.difference, *same.interval, same.different, same.margin) == (0, 0, 0, 1, 0)
    assert (*gone.interval, gone.different, gone.margin) == (2, 2, 0, 2)


RECORDS = {
    "table2-paper": ["sort"],
    "table2-sorting": ["sort"],
    "table3-laptop": ["all images", "MNIST, FashionMNIST, CIFAR-10"],
    "leak-laptop": ["anywhere", "always last"],
    "figure5-laptop": ["all models"],
    "figure6-paper": ["lr 1e-3", "lr 1e-4"],
}


@pytest.mark.slow
def test_the_docs_have_the_correlation_of_seeds_and_the_coverage_that_the_records_have():
    """Coverage of differences drawn with the variances of a record's settings, and with its correlations."""
    sorting, left, coverages = [], [], []
    for record, columns in RECORDS.items():
        for column, name in product(columns, ("kv", "kv+pos")):
            metric = open_record(record).tables[0].metric
            table = points_of(record, metric, column, name, "qkv").unstack("setting")
            of_block = table.columns.str.replace(r" heads=\d+", "", regex=True)
            within = correlation(table, lambda one, other, of=of_block: of[one] == of[other])
            between = correlation(table.T.groupby(of_block).mean().T)
            sorting += [within] if column == "sort" else []
            left += [between] if np.isfinite(between) else []
            coverages.append(coverage(table, of_block, *np.nan_to_num([within, between])))
    text = " ".join((REPOSITORY / "docs" / "reliability.md").read_text().split())
    said = f"on sort {min(sorting):.2f} to {max(sorting):.2f}. With heads averaged, {np.mean(left):.2f} is left"
    row = f"| the test, {len(coverages)} cases | – | – | {100 * np.mean(coverages):.1f} ({100 * min(coverages):.1f}) |"
    assert said in text, said
    assert row in text, row


def correlation(table, chosen=lambda one, other: True):
    """Return the sum of covariances over seeds of chosen pairs of columns / that of their mean variances."""
    both = variances = 0.0
    for one, other in combinations(range(table.shape[1]), 2):
        pair = table.iloc[:, [one, other]].dropna()
        if chosen(one, other) and len(pair) > 1:
            (first, covariance), (_, second) = np.cov(pair.to_numpy().T)
            both, variances = both + covariance, variances + (first + second) / 2
    return both / variances if variances else nan


def coverage(table, of_block, within, between, number=400):
    """Return how often the interval has the truth, 0, in tables with the same pairs."""
    rng, deviations, known = np.random.default_rng(0), table.std().fillna(table.std().mean()), table.notna()
    within, between = np.clip([max(within, between), between], 0, 0.95)
    same = np.equal.outer(of_block.to_numpy(), of_block.to_numpy())
    covariance = np.where(same, within, between) * np.outer(deviations, deviations)
    np.fill_diagonal(covariance, deviations**2)
    places = np.argwhere(known.to_numpy())
    settings, seeds = table.columns[places[:, 1]], table.index[places[:, 0]]
    held = 0
    for _ in range(number):
        drawn = rng.multivariate_normal(np.zeros(len(deviations)), covariance, len(table))
        low, high = compared(drawn[known.to_numpy()], settings, seeds).interval
        held += low <= 0 <= high
    return held / number


def test_blocks_with_one_seed_each_decide_about_solved_runs():
    """Two settings of a block that differ only in heads count once; ties do not count."""
    settings = [f"n={n} heads={heads}" for n in range(4) for heads in (1, 2)] * 2
    seeds, ours, theirs = [0] * 8 + [1] * 8, [1] * 12 + [0] * 4, [0] * 4 + [1] * 2 + [0] * 2 + [1] * 8
    found = compare_shares(*map(pd.Series, (ours, theirs, settings, seeds)))
    assert found[:4] == (12, 10, 3, 2)
    assert found.different == pytest.approx(min(1, 2 * stats.binom.cdf(2, 5, 0.5)))


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
def test_interval_test_and_verdict_never_contradict(difference, error, freedom, margin, better):
    assume(not difference or abs(difference) > 1e-9)  # no score differs by less
    found = Comparison(difference, error, freedom, 9, 9, 9)
    (low, high), different = found.interval, found.different
    assume(abs(different - 0.05) > 1e-9)  # where rounding decides
    assert (different < 0.05) == (not low <= 0 <= high)
    assert abs(difference) <= found.margin <= max(-low, high)
    judged = verdict(difference, different, found.margin < margin, better)
    assert (judged == "as good") == (found.margin < margin)
    assert (judged in ("better", "worse")) == (different < 0.05 and found.margin >= margin)
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
    for values, settings in (([1, 2], "aa"), ([1, 2], "ab"), ([1, 1, 1, 1], "aabb")):
        assert np.isnan(summarise(series(*values), pd.Series([*settings])).share_of_settings)
