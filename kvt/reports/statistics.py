"""Tests whether one attention is as good as another, from runs that are paired by task, settings and seed."""

from math import isnan, nan
from sys import float_info
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

SIGNIFICANT = 0.05
NO_DIRECTION, TOO_FEW, UNDECIDED = "direction unknown", "too few seeds", "undecided"
SHARED = 0.2  # correlation of the mean differences of two `blocks` of settings at one seed, estimated from docs/results


class Summary(NamedTuple):
    mean: float  # mean over settings of the mean over seeds
    over_settings: float  # standard deviation of the means of settings; NaN for a single setting
    over_seeds: float  # standard deviation over seeds, pooled over settings; NaN if each setting has a single seed
    runs: int
    settings: int
    share_of_settings: float  # share of the variance over runs that is due to settings, not to seeds; NaN if unknown


class Comparison(NamedTuple):
    """The difference between two attentions, in the units of the compared values."""

    difference: float  # mean over settings of the mean paired difference
    error: float  # standard error of `difference`; NaN if no block has two seeds that all its settings have
    freedom: float  # degrees of freedom of `error`
    pairs: int
    settings: int
    seeds: int

    def reach(self, level: float = 1 - SIGNIFICANT) -> float:
        """Return half the width of the t interval with the confidence `level`."""
        return float(stats.t.isf((1 - level) / 2, self.freedom)) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % t interval."""
        return self.difference - self.reach(), self.difference + self.reach()

    @property
    def different(self) -> float:
        """The two-sided p-value of the t-test of the hypothesis that the true difference is 0."""
        distance = abs(self.difference) / np.maximum(self.error, float_info.min)
        return float(2 * stats.t.sf(distance, self.freedom))

    @property
    def margin(self) -> float:
        """The smallest margin that contains the 90 % interval, and thus passes two one-sided t-tests (TOST) at 5 %."""
        return abs(self.difference) + self.reach(1 - 2 * SIGNIFICANT)


def summarise(values: pd.Series, settings: pd.Series) -> Summary:
    """Return the mean and the spread of a metric over runs, given the setting of each run; both are NaN without runs.

    `share_of_settings` assumes var(means of settings) = σ²_settings + σ²_seeds · mean(1 / number of seeds).
    """
    groups = values.groupby(settings)
    means, seeds = groups.mean(), groups.count()
    of_seeds = float((groups.var(ddof=1) * (seeds - 1)).sum() / ((seeds - 1).sum() or nan))
    of_settings = float(np.maximum(means.var(ddof=1) - of_seeds * (1 / seeds).mean(), 0))
    share = of_settings / (of_settings + of_seeds) if of_settings + of_seeds > 0 else nan
    spread = float(means.std(ddof=1)), of_seeds**0.5
    return Summary(float(means.mean()), *spread, len(values), len(means), share)


def blocks(settings: pd.Series) -> pd.Series:
    """Return each setting's block: its text without "heads=…". Runs of a block with the same seed are not independent.

    >>> blocks(pd.Series(["sort heads=2 length=16", "heads=4", "dim=32"])).tolist()
    ['sort length=16', '', 'dim=32']
    """
    return settings.astype(str).str.replace(r"(^| )heads=\S+", "", regex=True)


def compare(ours: pd.Series, baseline: pd.Series, settings: pd.Series, seeds: pd.Series) -> Comparison:
    """Compare paired runs. Each argument has one value for each pair.

    Let n be the number of seeds that all settings of a block have in common, w the block's share of all settings, and
    z the mean difference over the block's settings, one value for each of the n seeds. Welch's variance of the mean of
    independent blocks is V = Σ v over blocks, where v = w² · var(z) / n. For a block with n < 2, v is w² times the mean
    of var(z) over the blocks with n ≥ 2. The effective number of blocks is B = 1 / Σ w². With a correlation of ρ = 0.2
    between blocks of one seed, the standard error is √(V (1 + ρ (B − 1))). The degrees of freedom are
    min(V₁² / Σ (v² / (n − 1)), Σ (n − 1)) / (1 + ρ² (B − 1)), at least 1. In this formula, V₁ = Σ v and the other
    sums are over blocks with n ≥ 2.
    """
    pairs = pd.DataFrame({"d": ours.array - baseline.array, "setting": settings.array, "seed": seeds.array})
    table = pairs.pivot(index="seed", columns="setting", values="d")
    block = blocks(table.columns.to_series())
    of_blocks = [table.loc[:, block == name] for name in block.unique()]
    share = np.array([part.shape[1] for part in of_blocks]) / table.shape[1]
    means = [part.dropna().mean(axis=1) for part in of_blocks]
    n, variances = (np.array([getattr(z, of)() for z in means], float) for of in ("count", "var"))
    known = n > 1
    usual = variances[known].mean() if known.any() else nan
    v = share**2 * np.where(known, variances / n.clip(1), usual)
    of_known, freedoms, effective = v[known], n[known] - 1, 1 / (share**2).sum()
    with np.errstate(invalid="ignore"):  # 0 / 0 if no block has any spread
        welch = of_known.sum() ** 2 / (of_known**2 / freedoms).sum()
    freedom = max(1.0, float(np.fmin(welch, freedoms.sum())) / (1 + SHARED**2 * (effective - 1)))
    error = float(np.sqrt(v.sum() * (1 + SHARED * (effective - 1))))
    return Comparison(float(table.mean().mean()), error, freedom, len(pairs), table.shape[1], len(table))


class Shares(NamedTuple):
    """The numbers of paired runs that have solved a task with each of two attentions."""

    solved: int
    solved_by_baseline: int
    won: int  # number of combinations of block and seed in which the attention solves more runs than the baseline
    lost: int
    different: float  # p-value of the two-sided sign test of `won` against `lost`


def compare_shares(ours: pd.Series, baseline: pd.Series, settings: pd.Series, seeds: pd.Series) -> Shares:
    """Compare how many paired runs solved the task. `ours` and `baseline` are True for runs that solved it."""
    ours, baseline = ours.to_numpy(int), baseline.to_numpy(int)
    ahead = pd.Series(ours - baseline).groupby([blocks(pd.Series(settings.array)), seeds.to_numpy()]).sum()
    won, lost = int((ahead > 0).sum()), int((ahead < 0).sum())
    p = float(stats.binomtest(won, won + lost).pvalue) if won + lost else 1.0
    return Shares(int(ours.sum()), int(baseline.sum()), won, lost, p)


def holm(p: "pd.Series[float]") -> "pd.Series[float]":
    """Return p-values corrected for the number of tests by Holm's method. NaN stays NaN, and does not count."""
    ranked = p.dropna().sort_values()
    factors = np.arange(len(ranked), 0, -1)
    return (ranked * factors).cummax().clip(upper=1).reindex(p.index)


def verdict(difference: float, different: float, as_good: bool, better: str | None) -> str:
    """Return the verdict on a comparison. `different` is the corrected p-value, `as_good` whether TOST is passed."""
    if better is None:
        return NO_DIRECTION
    if isnan(different):
        return TOO_FEW
    if as_good:
        return "as good"
    if different < SIGNIFICANT:
        return "better" if (difference > 0) == (better == "more") else "worse"
    return UNDECIDED
