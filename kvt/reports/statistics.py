"""The statistics of a study: is one attention as good as another?

Runs are paired by task, settings and seed: both of a pair saw the same data in the same order.
"""

from math import isnan, nan
from sys import float_info
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

SIGNIFICANT = 0.05
NO_DIRECTION = "direction unknown"
MIN_SAMPLES = 3  # differences that are tested


class Summary(NamedTuple):
    mean: float  # over settings, of the mean over seeds
    over_settings: float  # standard deviation of these means; NaN for a single setting
    over_seeds: float  # standard deviation within a setting, pooled; NaN for a single seed
    runs: int
    settings: int
    share_of_settings: float  # of the variance over runs, the rest being due to seeds; NaN if unknown


class Comparison(NamedTuple):
    """The difference of an attention to the baseline, in the metric's units.

    Interval and tests assume normal differences and are corrected for the number of comparisons (Bonferroni): the
    interval excludes 0 exactly where p of `different` is below 5 %, and lies within the margin exactly where p of
    `equal` is.
    """

    difference: float  # mean over settings of the mean paired difference
    error: float  # its standard error; NaN where nothing is tested, and so are interval and p
    values: int  # in the test: settings, or the pairs of a single setting
    pairs: int
    settings: int

    def interval(self, comparisons: int = 1) -> tuple[float, float]:
        """Return the ends of the t interval; 95 % is the probability that all of so many intervals hold."""
        reach = float(stats.t.isf(SIGNIFICANT / (2 * comparisons), self.values - 1)) * self.error
        return self.difference - reach, self.difference + reach

    def different(self, comparisons: int = 1) -> float:
        """Return p of the t-test that the true difference is 0."""
        return self._p(abs(self.difference), comparisons)

    def equal(self, margin: float, comparisons: int = 1) -> float:
        """Return p that the true difference is beyond ±margin: two one-sided t-tests, doubled as is the interval."""
        return self._p(margin - abs(self.difference), comparisons)

    def _p(self, distance: float, comparisons: int) -> float:
        errors = distance / np.maximum(self.error, float_info.min)
        return float(np.minimum(2 * comparisons * stats.t.sf(errors, self.values - 1), 1))


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Return mean and spread of a metric over runs, given each run's setting; all NaN without any run.

    The variance of the means is σ² of settings + σ² of seeds · the mean of 1 / seeds (one-way random effects).
    """
    groups = values.groupby(settings)
    means, seeds = groups.mean(), groups.count()
    of_seeds = float((groups.var(ddof=1) * (seeds - 1)).sum() / ((seeds - 1).sum() or nan))
    of_settings = float(np.maximum(means.var(ddof=1) - of_seeds * (1 / seeds).mean(), 0))
    share = of_settings / (of_settings + of_seeds) if of_settings + of_seeds > 0 else nan
    spread = float(means.std(ddof=1)), of_seeds**0.5
    return Summary(float(means.mean()), *spread, len(values), len(means), share)


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series) -> Comparison:
    """Compare paired runs, one value of each argument for a pair.

    The sample is one of settings: the test is over their mean differences, whatever the number of seeds. The test of a
    single setting is over its pairs, and its answer is about this setting alone.
    """
    differences = (ours - baseline).to_numpy(float)
    by_setting = pd.Series(differences).groupby(settings.to_numpy()).mean().to_numpy()
    values = by_setting if len(by_setting) > 1 else differences
    error = float(stats.sem(values)) if len(values) >= MIN_SAMPLES else nan
    return Comparison(float(by_setting.mean()), error, len(values), len(differences), len(by_setting))


def verdict(low: float, high: float, margin: float, more_is_better: bool | None) -> str:
    """Return in words what an interval (low, high) of the difference to the baseline means."""
    if more_is_better is None:
        return NO_DIRECTION
    if isnan(low):
        return "too few runs"
    if -margin < low and high < margin:
        return "as good"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "undecided"
