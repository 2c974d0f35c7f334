"""The statistics of a study: is one attention as good as another?

Runs are paired: the same task, settings and seed, hence the same data, the same order of it, and only the attention
another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
SIGNIFICANT = 0.05
RESAMPLES = 9999


class Summary(NamedTuple):
    """A cell of a table.

    Attributes:
        mean: over settings, of the mean over seeds.
        over_settings: standard deviation of these means; NaN for a single setting.
        over_seeds: standard deviation within a setting, pooled; NaN for a single seed.
        runs: how many there are.
        settings: of how many settings.
    """

    mean: float
    over_settings: float
    over_seeds: float
    runs: int
    settings: int


class Comparison(NamedTuple):
    """An attention against the baseline, in the metric's own units; positive is more.

    Attributes:
        difference: the mean over settings of the mean paired difference.
        low: lower end of its 95 % bootstrap interval.
        high: upper end.
        inner: the 90 % interval, which equivalence is judged by.
        p: of the sign-flip permutation test on the pairs.
        pairs: how many there are.
        settings: of how many settings.
    """

    difference: float
    low: float
    high: float
    inner: tuple[float, float]
    p: float
    pairs: int
    settings: int


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Mean and spread of a metric over runs, each with its setting; all NaN without any run."""
    groups = values.groupby(settings)
    means, variances = groups.mean(), groups.var(ddof=1)
    over_settings = means.std(ddof=1) if len(means) > 1 else np.nan
    over_seeds = np.sqrt(variances.mean())
    return Summary(float(means.mean()), float(over_settings), float(over_seeds), len(values), len(means))


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series) -> Comparison:
    """Compares paired runs.

    The interval is a percentile bootstrap of the settings' mean differences, for seeds of one setting are no news about
    another; of the pairs, where there is one setting only. The test flips the signs of the pairs' differences: were it
    all the same which attention a model has, each sign would be as likely as the other.

    Args:
        ours: a metric of an attention, one a pair.
        baseline: of the same pairs.
        settings: of the same pairs.
    """
    differences = (ours - baseline).to_numpy(float)
    by_setting = pd.Series(differences).groupby(settings.to_numpy()).mean().to_numpy()
    units = by_setting if len(by_setting) > 1 else differences
    low, high = _interval(units, CONFIDENCE)
    # two one-sided tests at 5 % are a 90 % interval within the margin
    inner = _interval(units, 1 - 2 * SIGNIFICANT)
    p = _sign_flips(differences)
    return Comparison(float(by_setting.mean()), low, high, inner, p, len(differences), len(by_setting))


def holm(p: Sequence[float]) -> list[float]:
    """Corrects p-values for their number: at 5 %, one false claim in all of them has a chance of at most 5 %.

    What is NaN was not tested, stays NaN and does not count.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, float)
    order = np.argsort(values)  # NaN comes last
    factors = np.maximum(np.isfinite(values).sum() - np.arange(len(values)), 1)
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(values[order] * factors), 1)
    return [float(value) for value in corrected]


def verdict(comparison: Comparison, p: float, margin: float, more_is_better: bool) -> str:
    """What the numbers say.

    "as good" if the 90 % interval lies within ± margin (two one-sided tests at 5 %); else "better" or "worse" if the
    corrected p is below 5 %; else "undecided". Fewer than two pairs say nothing.

    Args:
        comparison: the numbers.
        p: corrected.
        margin: what still counts as equal, in the metric's units.
        more_is_better: or less, as for a loss.
    """
    if comparison.pairs < 2:
        return "too few runs"
    if -margin < comparison.inner[0] and comparison.inner[1] < margin:
        return "as good"
    if p < SIGNIFICANT:
        return "better" if (comparison.difference > 0) == more_is_better else "worse"
    return "undecided"


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    if len(values) < 2:
        return np.nan, np.nan
    found = stats.bootstrap(
        (values,), np.mean, confidence_level=confidence, n_resamples=RESAMPLES, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def _sign_flips(differences: np.ndarray) -> float:
    if len(differences) < 2:
        return np.nan
    return float(
        stats.permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=0, vectorized=True
        ).pvalue
    )
