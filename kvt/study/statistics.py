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
FEWEST = 3
"""With fewer differences nothing is tested."""


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
        different: p of the t-test that it is 0; NaN if there are too few.
        equal: p of the two one-sided t-tests that it is beyond the margin; NaN if there are too few.
        pairs: how many there are.
        settings: of how many settings.
    """

    difference: float
    low: float
    high: float
    different: float
    equal: float
    pairs: int
    settings: int


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Mean and spread of a metric over runs, each with its setting; all NaN without any run."""
    groups = values.groupby(settings)
    means, variances = groups.mean(), groups.var(ddof=1)
    over_settings = means.std(ddof=1) if len(means) > 1 else np.nan
    over_seeds = np.sqrt(variances.mean())
    return Summary(float(means.mean()), float(over_settings), float(over_seeds), len(values), len(means))


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series, margin: float) -> Comparison:
    """Compares paired runs.

    What is drawn by chance is a setting: the question is how attentions differ in settings such as these, and seeds
    of one setting are no news about another. So interval and tests are those of the settings' mean differences; where
    there is one setting only, of its seeds'.

    Args:
        ours: a metric of an attention, one a pair.
        baseline: of the same pairs.
        settings: of the same pairs.
        margin: what still counts as equal.
    """
    differences = (ours - baseline).to_numpy(float)
    by_setting = pd.Series(differences).groupby(settings.to_numpy()).mean().to_numpy()
    units = by_setting if len(by_setting) > 1 else differences
    low, high = _interval(units)
    different = _t_test(units, 0, "two-sided")
    # that it is not below −margin, and that it is not above margin: both must be shown
    equal = max(_t_test(units, -margin, "greater"), _t_test(units, margin, "less"))
    return Comparison(float(by_setting.mean()), low, high, different, equal, len(differences), len(by_setting))


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


def verdict(difference: float, different: float, equal: float, more_is_better: bool) -> str:
    """What the numbers say.

    "as good" if `equal` is below 5 %; else "better" or "worse" if `different` is; else "undecided".

    Args:
        difference: to the baseline.
        different: p that there is none, corrected.
        equal: p that it is beyond the margin, corrected.
        more_is_better: or less, as for a loss.
    """
    if not np.isfinite([different, equal]).all():
        return "too few runs"
    if equal < SIGNIFICANT:
        return "as good"
    if different < SIGNIFICANT:
        return "better" if (difference > 0) == more_is_better else "worse"
    return "undecided"


def _interval(values: np.ndarray) -> tuple[float, float]:
    if len(values) < 2:
        return np.nan, np.nan
    found = stats.bootstrap(
        (values,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, method="percentile", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def _t_test(values: np.ndarray, mean: float, alternative: str) -> float:
    """The p-value of the hypothesis that values with another mean, in that direction, look so much like having it."""
    if len(values) < FEWEST:
        return np.nan
    if np.ptp(values) == 0:  # no spread: what is there is certain
        holds = {"two-sided": values[0] != mean, "greater": values[0] > mean, "less": values[0] < mean}
        return 0.0 if holds[alternative] else 1.0
    return float(stats.ttest_1samp(values, mean, alternative=alternative).pvalue)
