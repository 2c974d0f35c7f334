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
MIN_SAMPLES = 3  # seeds of a single setting, or settings, that are tested
EXACT = 1e-9  # the error of rounding


class Summary(NamedTuple):
    mean: float  # over settings, of the mean over seeds
    over_settings: float  # standard deviation of these means; NaN for a single setting
    over_seeds: float  # standard deviation within a setting, pooled; NaN for a single seed
    runs: int
    settings: int
    share_of_settings: float  # of the variance over runs, the rest being due to seeds; NaN if unknown


class Spread(NamedTuple):
    """The standard error of a mean difference, with its degrees of freedom; NaN where it is unknown."""

    error: float = nan
    freedom: float = nan

    @property
    def reach(self) -> float:
        """Half the width of the 95 % t interval."""
        return float(stats.t.isf(SIGNIFICANT / 2, self.freedom)) * self.error

    def p(self, distance: float) -> float:
        """Return the two-sided p-value of a difference that is `distance` away from the value tested."""
        return float(np.minimum(2 * stats.t.sf(distance / np.maximum(self.error, float_info.min), self.freedom), 1))


class Comparison(NamedTuple):
    """The difference of an attention to another, in the metric's units.

    The settings are those of the grid, and the sample is one of their seeds; with hardly more than one seed it is one
    of settings.
    `beyond` takes both for samples, and so tells of other settings. Intervals and tests take differences for normal;
    the interval excludes 0 exactly where p of `different` is below 5 %, and lies within the margin exactly where p of
    `equal` is.
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
        """The ends of the interval that holds for other settings, too."""
        return self.difference - self.beyond.reach, self.difference + self.beyond.reach

    @property
    def different(self) -> float:
        """The p-value of the t-test that the true difference is 0."""
        return self.spread.p(abs(self.difference))

    def equal(self, margin: float) -> float:
        """Return p that the true difference is beyond ±margin: two one-sided t-tests, doubled as is the interval."""
        return self.spread.p(margin - abs(self.difference))


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


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series, seeds: pd.Series) -> Comparison:
    """Compare paired runs, one value of each argument for a pair.

    Let d be the difference of a pair less the mean of its setting, n the seeds of its setting, and S the number of
    settings. Two intervals are computed, and the wider one is used:

    * Pairs are independent: the variance of the mean is Σ d² / Σ (n − 1) · Σ 1/n / S², with Σ (n − 1) degrees of
      freedom.
    * Seeds are independent, and the pairs of a seed may move together, as the seed chooses data, their order and
      weights in all settings: the variance is R / (R − 1) · Σ u² with u = Σ d / (n · S) over the pairs of a seed, with
      R − 1 degrees of freedom. R = 1 / Σ w² is the effective number of seeds, where a seed's weight w is its sum of
      1 / (n · S); it is the number of seeds if all settings have the same ones.

    With fewer than two effective seeds the sample is one of settings. Beyond the grid, the variance of the settings'
    means divided by S is added (Satterthwaite); the noise of single runs is in both terms, which errs on the wide side.
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
    """Write a difference with half the width of its interval, or without it if that is NaN.

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
    """How many of paired runs have solved a task, with an attention and with another.

    For results of which some are perfect and others near chance, whose mean says nothing about either.
    """

    solved: int
    solved_by_baseline: int
    pairs: int
    different: float  # p of the sign test over the pairs of which one alone is solved (McNemar's exact test)


def compare_shares(ours: pd.Series, baseline: pd.Series) -> Shares:
    """Compare paired runs by whether they have solved a task."""
    ours, baseline = ours.to_numpy(bool), baseline.to_numpy(bool)
    wins, losses = int((ours & ~baseline).sum()), int((baseline & ~ours).sum())
    p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Shares(int(ours.sum()), int(baseline.sum()), len(ours), p)


def holm(p: "pd.Series[float]") -> "pd.Series[float]":
    """Return the p-values of a family of tests corrected for their number by Holm's method; NaN is no test.

    The probability of any false finding at 5 % is then 5 % or less, however the tests depend on each other.
    """
    ranked = p.dropna().sort_values()
    factors = np.arange(len(ranked), 0, -1)
    return (ranked * factors).cummax().clip(upper=1).reindex(p.index)


def verdict(difference: float, different: float, equal: float, better: str | None) -> str:
    """Return in words what a difference to the baseline means, given the p-values of "different" and "equal"."""
    if better is None:
        return NO_DIRECTION
    if isnan(different):
        return "too few runs"
    if equal < SIGNIFICANT:
        return "as good"
    if different < SIGNIFICANT:
        return "better" if (difference > 0) == (better == "more") else "worse"
    return "undecided"
