"""The statistics of a study: is one attention as good as another?

Runs are paired: the same task, settings and seed, hence the same data, the same order of it, and only the attention
another.
"""

from math import isnan, nan
from sys import float_info
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

SIGNIFICANT = 0.05
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

    Interval and tests take the differences for normal, and are corrected for the number of comparisons by the same
    factor (Bonferroni): the interval excludes 0 exactly where p of `different` is below 5 %, and lies within the margin
    exactly where p of `equal` is. One false claim in all comparisons has a chance of at most 5 %.

    Attributes:
        difference: the mean over settings of the mean paired difference.
        error: its standard error; NaN where nothing is tested, and so are interval and p.
        values: how many it is the mean of: settings, or where there is one only, its pairs.
        pairs: how many there are.
        settings: of how many settings.
    """

    difference: float
    error: float
    values: int
    pairs: int
    settings: int

    def interval(self, comparisons: int = 1) -> tuple[float, float]:
        """Ends of the t interval; with 95 % all of so many contain their true differences."""
        reach = float(stats.t.isf(SIGNIFICANT / (2 * comparisons), self.values - 1)) * self.error
        return self.difference - reach, self.difference + reach

    def different(self, comparisons: int = 1) -> float:
        """p of the t-test that the true difference is 0."""
        return self._p(abs(self.difference), comparisons)

    def equal(self, margin: float, comparisons: int = 1) -> float:
        """p that the true difference is ±margin or beyond.

        The greater of two one-sided t-tests, doubled: it is judged by the interval that `different` is judged by.
        """
        return self._p(margin - abs(self.difference), comparisons)

    def _p(self, distance: float, comparisons: int) -> float:
        """Two-sided, of a true mean at this distance from ours; where the values do not differ, 0 at any distance."""
        errors = distance / np.maximum(self.error, float_info.min)
        return float(np.minimum(2 * comparisons * stats.t.sf(errors, self.values - 1), 1))


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Mean and spread of a metric over runs, each with its setting; all NaN without any run."""
    groups = values.groupby(settings)
    means, variances = groups.mean(), groups.var(ddof=1)
    over_settings = means.std(ddof=1) if len(means) > 1 else np.nan
    over_seeds = np.sqrt(variances.mean())
    return Summary(float(means.mean()), float(over_settings), float(over_seeds), len(values), len(means))


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series) -> Comparison:
    """Compares paired runs.

    What is drawn by chance is a setting: the question is how attentions differ in settings such as these, and seeds
    of one setting are no news about another. So interval and tests are those of the settings' mean differences; where
    there is one setting only, of its pairs', and the answer is about this setting alone.

    Args:
        ours: a metric of an attention, one a pair.
        baseline: of the same pairs.
        settings: of the same pairs.
    """
    differences = (ours - baseline).to_numpy(float)
    by_setting = pd.Series(differences).groupby(settings.to_numpy()).mean().to_numpy()
    values = by_setting if len(by_setting) > 1 else differences
    error = float(stats.sem(values)) if len(values) >= FEWEST else nan
    return Comparison(float(by_setting.mean()), error, len(values), len(differences), len(by_setting))


def verdict(low: float, high: float, margin: float, more_is_better: bool) -> str:
    """What an interval of the difference to the baseline says.

    "as good" if all of it is within the margin; else "better" or "worse" if 0 is outside; else "undecided".

    Args:
        low: its lower end; NaN where there is none.
        high: its upper end.
        margin: what still counts as equal.
        more_is_better: or less, as for a loss.
    """
    if isnan(low):
        return "too few runs"
    if -margin < low and high < margin:
        return "as good"
    if low > 0 or high < 0:
        return "better" if (low > 0) == more_is_better else "worse"
    return "undecided"
