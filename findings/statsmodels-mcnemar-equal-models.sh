#!/usr/bin/env bash
# statsmodels' McNemar test with the χ² distribution gives p = 0 for two classifiers that are right and wrong on the same examples.
#
# Expected: p = 1, because no example distinguishes the classifiers, or NaN with a warning.
# Real: without a discordant example the statistic is (|0 − 0| − 1)² / 0 = inf, and p = 0: "the models differ" for equal models.
#   With equal numbers of discordant examples on both sides, the continuity correction makes the statistic (0 − 1)² / n instead of 0.
#   The exact test (exact=True) gives p = 1 in both cases.
#
# Python 3.11.7, statsmodels 0.15.0, scipy 1.17.1, numpy 2.4.6, pandas 3.1.1. Seen on 2026-11-27:
#   no discordant example: chi2 p 0.0, exact p 1.0
#   five on each side: chi2 statistic 0.1, exact p 1.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet statsmodels==0.15.0 scipy==1.17.1 numpy==2.4.6 pandas==3.1.1
"$work/venv/bin/python" -W ignore - <<'PYTHON'
from statsmodels.stats.contingency_tables import mcnemar

same = [[70, 0], [0, 30]]  # rows: the first classifier is right, wrong; columns: the second
chi2, exact = (mcnemar(same, exact=exact).pvalue for exact in (False, True))
print(f"no discordant example: chi2 p {chi2}, exact p {exact}")

even = [[60, 5], [5, 30]]
statistic, exact_even = mcnemar(even, exact=False).statistic, mcnemar(even, exact=True).pvalue
print(f"five on each side: chi2 statistic {statistic}, exact p {exact_even}")

assert (chi2, exact) == (0.0, 1.0), "equal classifiers are no longer different: this finding is out of date"
assert (statistic, exact_even) == (0.1, 1.0)
PYTHON
