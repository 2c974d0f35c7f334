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
MIN_SAMPLES = 3  # differences that are tested


class Summary(NamedTuple):
    mean: float  # over settings, of the mean over seeds
    over_settings: float  # standard deviation of these means; NaN for a single setting
    over_seeds: float  # standard deviation within a setting, pooled; NaN for a single seed
    runs: int
    settings: int

    @property
    def of_settings(self) -> float:
        """The share of the variance over runs that is due to settings, the rest being due to seeds; NaN if unknown.

        Of the variance of means over seeds, that of the seeds in them is taken off (one-way random effects).
        """
        of_seeds = self.over_seeds**2
        of_settings = np.maximum(self.over_settings**2 - of_seeds * self.settings / max(self.runs, 1), 0)
        return float(of_settings / (of_settings + of_seeds)) if of_settings + of_seeds > 0 else nan


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
    """Return mean and spread of a metric over runs, given each run's setting; all NaN without any run."""
    groups = values.groupby(settings)
    means, freedom = groups.mean(), groups.count() - 1
    over_seeds = float(np.sqrt((groups.var(ddof=1) * freedom).sum() / (freedom.sum() or nan)))
    return Summary(float(means.mean()), float(means.std(ddof=1)), over_seeds, len(values), len(means))


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


def verdict(low: float, high: float, margin: float, more_is_better: bool) -> str:
    """Return in words what an interval (low, high) of the difference to the baseline means."""
    if isnan(low):
        return "too few runs"
    if -margin < low and high < margin:
        return "as good"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "undecided"
