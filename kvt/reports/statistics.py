"""Tests whether one attention is as good as another.

Runs are paired by task, settings and seed. Both runs of a pair have read the same data in the same order.
"""

from math import isnan, nan
from sys import float_info
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

SIGNIFICANT = 0.05
NO_DIRECTION = "direction unknown"
MIN_SAMPLES = 3  # a test needs this number of settings, or this number of seeds of a single setting
EXACT = 1e-9  # tolerance for rounding errors


class Summary(NamedTuple):
    mean: float  # mean over settings of the mean over seeds
    over_settings: float  # standard deviation of these means; NaN for a single setting
    over_seeds: float  # standard deviation over the seeds of a setting, pooled over settings; NaN for a single seed
    runs: int
    settings: int
    share_of_settings: float  # share of the variance over runs that is due to settings, not to seeds; NaN if unknown


class Spread(NamedTuple):
    """The standard error of a mean difference, and the degrees of freedom of this error; NaN if unknown."""

    error: float = nan
    freedom: float = nan

    @property
    def reach(self) -> float:
        """Half the width of the 95 % t interval."""
        return float(stats.t.isf(SIGNIFICANT / 2, self.freedom)) * self.error

    def p(self, distance: float) -> float:
        """Return the two-sided p-value of a difference whose distance from the tested value is `distance`."""
        return float(np.minimum(2 * stats.t.sf(distance / np.maximum(self.error, float_info.min), self.freedom), 1))


class Comparison(NamedTuple):
    """The difference between two attentions, in the units of the metric.

    `spread` describes the settings of the grid: seeds are the sample. With fewer than two seeds on average, settings
    are the sample. `beyond` describes settings in general: settings and seeds are samples. Intervals and tests assume
    normally distributed differences. The interval excludes 0 if and only if `different` is below 5 %. The interval lies
    within the margin if and only if `equal` is below 5 %.
    """

    difference: float  # mean over settings of the mean paired difference
    spread: Spread
    beyond: Spread
    pairs: int
    settings: int
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % t interval."""
        return self.difference - self.spread.reach, self.difference + self.spread.reach

    @property
    def interval_beyond(self) -> tuple[float, float]:
        """The ends of the 95 % t interval for settings in general, not only for the settings of the grid."""
        return self.difference - self.beyond.reach, self.difference + self.beyond.reach

    @property
    def different(self) -> float:
        """The p-value of the t-test of the hypothesis that the true difference is 0."""
        return self.spread.p(abs(self.difference))

    def equal(self, margin: float) -> float:
        """Return the p-value of two one-sided t-tests (TOST) for ± margin, doubled to agree with the 95 % interval."""
        return self.spread.p(margin - abs(self.difference))


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Return the mean and the spread of a metric over runs, given the setting of each run; NaN without runs.

    The variance of the means is σ² of settings + σ² of seeds · the mean of 1 / seeds (one-way random effects), where
    "seeds" is the number of seeds of a setting.
    """
    groups = values.groupby(settings)
    means, seeds = groups.mean(), groups.count()
    of_seeds = float((groups.var(ddof=1) * (seeds - 1)).sum() / ((seeds - 1).sum() or nan))
    of_settings = float(np.maximum(means.var(ddof=1) - of_seeds * (1 / seeds).mean(), 0))
    share = of_settings / (of_settings + of_seeds) if of_settings + of_seeds > 0 else nan
    spread = float(means.std(ddof=1)), of_seeds**0.5
    return Summary(float(means.mean()), *spread, len(values), len(means), share)


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series, seeds: pd.Series) -> Comparison:
    """Compare paired runs. Each argument has one value for each pair.

    Let d be the difference of a pair minus the mean difference of the pair's setting, n the number of seeds of this
    setting, and S the number of settings. Two intervals are computed, and the wider one is used:

    * If pairs are independent, the variance of the mean is Σ d² / Σ (n − 1) · Σ 1/n / S², with Σ (n − 1) degrees of
      freedom.
    * If only seeds are independent, because a seed chooses data, order and initial weights in all settings, the
      variance of the mean is R / (R − 1) · Σ u² with u = Σ d / (n · S) over the pairs of a seed, with R − 1 degrees of
      freedom. R = 1 / Σ w² is the effective number of seeds. The weight w of a seed is the sum of 1 / (n · S) over the
      seed's pairs. If all settings have the same seeds, R is the number of seeds.

    With fewer than two effective seeds, settings are the sample. For `beyond`, the variance of the means of settings
    divided by S is added (Satterthwaite). Both terms contain the noise of single runs, so this interval tends to be too
    wide.
    """
    pairs = pd.DataFrame({"d": ours.array - baseline.array, "setting": settings.array, "seed": seeds.array})
    groups = pairs.groupby("setting").d
    means, count = groups.mean(), groups.count()
    within, freedom = pairs.d - groups.transform("mean"), int((count - 1).sum())
    weights = 1 / groups.transform("size") / len(means)
    of_seeds, of_weights = ((each * weights).groupby(pairs.seed).sum() for each in (within, 1))
    seeds = float(1 / (of_weights**2).sum())
    fixed, sample = Spread(), Spread()
    if freedom >= MIN_SAMPLES - 1 and seeds > 2 - EXACT:
        independent = (within**2).sum() / freedom * (1 / count).sum() / len(means) ** 2
        together = seeds / (seeds - 1) * (of_seeds**2).sum()
        spreads = Spread(float(independent**0.5), freedom), Spread(float(together**0.5), seeds - 1)
        fixed = max(spreads, key=lambda spread: spread.reach)
    if len(means) >= MIN_SAMPLES:
        sample = Spread(float(stats.sem(means)), len(means) - 1)
    spread = sample if isnan(fixed.error) else fixed
    return Comparison(float(means.mean()), spread, _joined(fixed, sample), len(pairs), len(means), len(of_seeds))


def with_reach(difference: float, reach: float) -> str:
    """Format a difference, followed by ± half the width of its interval. If `reach` is NaN, leave out the ± part.

    >>> with_reach(0.25, 0.125), with_reach(-0.25, float("nan"))
    ('+0.250 ± 0.125', '-0.250')
    """
    return f"{difference:+.3f}" + ("" if isnan(reach) else f" ± {reach:.3f}")


def _joined(one: Spread, other: Spread) -> Spread:
    variances = np.square([one.error, other.error])
    if not (total := variances.sum()):
        return Spread(0, one.freedom + other.freedom)
    return Spread(float(total**0.5), float(total**2 / (variances**2 / (one.freedom, other.freedom)).sum()))


class Shares(NamedTuple):
    """The numbers of paired runs that have solved a task with each of two attentions.

    The numbers suit tasks in which some runs are perfect and other runs are near chance. A mean suits neither group.
    """

    solved: int
    solved_by_baseline: int
    pairs: int
    different: float  # p-value of the sign test over pairs with one solved run (McNemar's exact test)


def compare_shares(ours: pd.Series, baseline: pd.Series) -> Shares:
    """Compare the numbers of solved runs of two attentions, given whether each run of each pair has solved the task."""
    ours, baseline = ours.to_numpy(bool), baseline.to_numpy(bool)
    wins, losses = int((ours & ~baseline).sum()), int((baseline & ~ours).sum())
    p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Shares(int(ours.sum()), int(baseline.sum()), len(ours), p)


def holm(p: "pd.Series[float]") -> "pd.Series[float]":
    """Return p-values corrected for the number of tests by Holm's method. NaN does not count as a test.

    At a threshold of 5 % for the corrected p-values, the probability of one or more false findings is at most 5 %, even
    if the tests depend on each other.
    """
    ranked = p.dropna().sort_values()
    factors = np.arange(len(ranked), 0, -1)
    return (ranked * factors).cummax().clip(upper=1).reindex(p.index)


def verdict(difference: float, different: float, equal: float, better: str | None) -> str:
    """Return the verdict of a comparison, given the p-values of `Comparison.different` and `Comparison.equal`."""
    if better is None:
        return NO_DIRECTION
    if isnan(different):
        return "too few runs"
    if equal < SIGNIFICANT:
        return "as good"
    if different < SIGNIFICANT:
        return "better" if (difference > 0) == (better == "more") else "worse"
    return "undecided"
