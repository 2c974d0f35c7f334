"""Writes docs/claims.md: the claims of the paper and of this project, each with its evidence from records or tests.

claims.yaml has a claim and one kind of evidence for it: the name of a function below with its arguments. A claim whose
record does not exist, or has none of the runs, is not tested yet.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvt.reports.best_of import best_of
from kvt.reports.levels import ACCURACY, NEAR, add_cycles, level, longer_cycles, stands
from kvt.reports.names import Metric, in_words, label, metric_of
from kvt.reports.padding import COUNTED, REAL, perplexity_costs
from kvt.reports.page import markdown_table
from kvt.reports.statistics import Comparison, compare, verdict
from kvt.reports.tables import finite
from kvt.study.grid import Grid, read_grid
from kvt.study.outcomes import State, table_of_histories, table_of_results
from kvt.study.records import MANIFEST, find_outcomes, read_record
from kvt.system.files import read_yaml
from kvt.system.quoting import Markdown

CLAIMS = Path(__file__).with_name("claims.yaml")
COSTS = {"parameters": "parameters", "training_ms": "time of a training step", "training_peak_bytes": "peak memory"}
MARGIN = 1.0  # points that count as equal
UNTESTED = "not tested yet"

PAGE = Markdown("""\
# Claims

What the paper says, and what we measured: {counts}.

Runs are paired by task, settings and seed. A difference is the mean over settings, in points (hundredths of accuracy
or of a nat, a BLEU, or one per cent of perplexity), with its 95 % t interval over settings, or over the seeds of a
single one. If a claim has two comparisons, both intervals hold together with 95 %; they are not corrected for the
number of claims. A report corrects all its comparisons together, and has a line for each task or column: what holds
here, over all of them or for one question alone, may be undecided there. *As good* means within ± {margin:g} point;
*undecided* names the smallest margin within which the runs show two attentions equal. Ours are small models and short
runs (see each record): what fails here may hold at the paper's sizes.

`kvt study claims` writes this page from the records in [docs/results](results).

## The paper's

{paper}

## Ours

{ours}
""")


class Evidence(NamedTuple):
    measured: str
    verdict: str


class Record(NamedTuple):
    rows: pd.DataFrame  # finished runs of a grid, or sizes of a layer
    histories: pd.DataFrame
    grid: Grid | None = None


def write_claims(records: Path) -> str:
    """Return the page of claims as Markdown, with the evidence of the records in a folder."""
    claims: Mapping[str, Sequence[dict[str, Any]]] = read_yaml(CLAIMS, CLAIMS.name)
    open_record = cache(lambda name: _read(records / name))
    texts, verdicts = {}, []
    for whose, heading in (("paper", ["claim", "published"]), ("ours", ["claim"])):
        lines = [[*heading, "measured", "verdict", "evidence"]]
        for claim in claims[whose]:
            found = judge(claim, open_record)
            verdicts.append(found.verdict)
            says = f"“{claim['says']}” ({claim['where']})" if whose == "paper" else claim["says"]
            about = [says, *([claim["published"]] if whose == "paper" else [])]
            lines.append([*about, found.measured, Markdown("**{}**").format(found.verdict), _where(claim, open_record)])
        texts[whose] = markdown_table(lines)
    kinds = {"holds": "hold", "fails": "fail", "undecided": "are undecided", UNTESTED: f"are {UNTESTED}"}
    numbers = {word: sum(text.startswith(kind) for text in verdicts) for kind, word in kinds.items()}
    counts = ", ".join(f"{number} {word}" for word, number in numbers.items() if number)
    return str(PAGE.format(counts=f"of {len(verdicts)} claims {counts}", margin=MARGIN, **texts))


def judge(claim: Mapping[str, Any], open_record: Callable[[str], Record | None]) -> Evidence:
    """Return the measurement and the verdict of a claim; `open_record` returns a record by its name, or None."""
    found = None
    kind, arguments = _evidence(claim)
    if kind == "tested":
        found = Evidence("by tests", arguments["verdict"])
    elif kind and (record := open_record(arguments["record"])) is not None:
        found = OF_A_RECORD[kind](record, **{name: value for name, value in arguments.items() if name != "record"})
    return found or Evidence("–", UNTESTED)


def _evidence(claim: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a claim's evidence and its arguments; "" and none if it has no evidence."""
    return next(((kind, claim[kind]) for kind in (*OF_A_RECORD, "tested") if kind in claim), ("", {}))


def compared(
    record: Record,
    metric: str,
    pairs: Sequence[Sequence[str]],
    claimed: str,
    where: Mapping[str, Any] | None = None,
    over_training: bool = False,
) -> Evidence | None:
    """Compare attentions; it is `claimed` that the first of each pair is "better", "worse" or "as good".

    Args:
        where: which runs: a value, or several, of "task" or a setting.
        over_training: whether to compare the mean over a run's validations, which is better the faster it learns.
    """
    rows = record.rows
    if over_training:
        rows = rows.assign(**{metric: rows.name.map(record.histories.groupby("name")[metric].mean())})
    kind, rows = metric_of(metric), finite(_choose(rows, where), metric)
    table = rows.pivot(index=["task", "setting", "seed"], columns="attention", values=metric).reset_index()
    texts, judged, margins = [], [], []
    for one, other in pairs:
        if not {one, other} <= set(table) or not len(both := table.dropna(subset=[one, other])):
            return None
        numbers = compare(kind.scaled(both[one]), kind.scaled(both[other]), both.task + " " + both.setting)
        low, high = numbers.interval(len(pairs))
        judged.append(verdict(low, high, MARGIN * kind.point, kind.more_is_better))
        margins.append(max(abs(low), abs(high)) / kind.point)
        said = _with_interval(numbers.difference, low, high, kind)
        texts.append(f"{label(one)} − {label(other)}: {said}, {_count(numbers)}")
    what = in_words(metric) + ", mean over training" * over_training
    less = " (less is better)" * (kind.more_is_better is False)
    return Evidence(f"{what}{less}: {'; '.join(texts)}", _verdict(pairs, judged, margins, claimed))


def _choose(rows: pd.DataFrame, where: Mapping[str, Any] | None) -> pd.DataFrame:
    for name, values in (where or {}).items():
        rows = rows[rows[name].isin(values if isinstance(values, list) else [values])]
    return rows


def _with_interval(difference: float, low: float, high: float, kind: Metric) -> str:
    interval = f" [{kind.points(low)}, {kind.points(high)}]" if np.isfinite(low) else ""
    return kind.points(difference) + interval


def _count(numbers: Comparison) -> str:
    settings = f"{numbers.settings} settings" if numbers.settings > 1 else "1 setting"
    return f"n = {numbers.pairs} pairs of {settings}"


def _verdict(pairs: Sequence[Sequence[str]], judged: Sequence[str], margins: Sequence[float], claimed: str) -> str:
    if all(one == claimed for one in judged):
        return "holds"
    contrary = {"better", "worse", "as good"} - {claimed}
    for (one, other), found in zip(pairs, judged, strict=True):
        if found in contrary:
            return f"fails: {label(one)} is {found} {'as' if found == 'as good' else 'than'} {label(other)}"
    if "too few runs" in judged:
        return "undecided: too few settings or seeds"
    return f"undecided: shown equal only within ± {max(margins):.2f}"


def levels(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Count the one-head, one-layer runs on cycles of more than two tokens that exceed the level of the law."""
    assert record.grid is not None
    length = record.grid.runs[0].value("length")
    runs = add_cycles(record.rows, record.grid)
    runs = runs[runs.attention.isin(attentions) & (runs.depth == 1) & (runs.heads == 1) & (runs.cycle > 2)]
    if not len(runs):
        return None
    heights = runs.cycle.map(lambda cycle: level(length, longer_cycles(length, cycle)))
    above = int((runs[ACCURACY] > heights + NEAR).sum())
    on = int(((runs[ACCURACY] - heights).abs() <= NEAR).sum())
    who = " and ".join(map(label, attentions))
    text = f"one head of {who}, shifts with longer cycles: {above} of {len(runs)} runs above the level, {on} on it, "
    text += f"{int(stands(runs[ACCURACY], length).sum())} on a level of the law, this or another"
    return Evidence(text, "holds" if (above == 0) == (attentions != ["qkv"]) else "fails")


def means(record: Record, metric: str, task: str) -> Evidence | None:
    """Compute the mean of each attention in a task; it is claimed that every run learns it."""
    kind, rows = metric_of(metric), finite(_choose(record.rows, {"task": task}), metric)
    if not len(rows):
        return None
    found = rows.groupby("attention", sort=False)[metric].mean()
    text = ", ".join(f"{label(attention)} {kind.value(mean)}" for attention, mean in found.items())
    learned = (rows[metric] > kind.highest - MARGIN * kind.point).mean()
    said = f"{task}, {in_words(metric)}: {text}, n = {len(rows)} runs"
    return Evidence(said, "holds" if learned == 1 else f"fails: {100 * learned:.0f} % of the runs")


def raised(
    record: Record, metric: str, above: str, claimed: str, where: Mapping[str, Any] | None = None
) -> Evidence | None:
    """Compare two metrics of the same runs; it is `claimed` that the first is "better" or "as good"."""
    kind, rows = metric_of(metric), finite(finite(_choose(record.rows, where), metric), above)
    if not len(rows):
        return None
    numbers = compare(kind.scaled(rows[metric]), kind.scaled(rows[above]), rows.task + " " + rows.setting)
    low, high = numbers.interval()
    said = _with_interval(numbers.difference, low, high, kind)
    text = f"{in_words(metric)} − {in_words(above)}: {said}, n = {numbers.pairs} runs of {numbers.settings} settings"
    judged = verdict(low, high, MARGIN * kind.point, kind.more_is_better)
    if judged in ("too few runs", "undecided"):
        return Evidence(text, "undecided")
    return Evidence(text, "holds" if judged == claimed else f"fails: it is {judged}")


def costs(record: Record, attention: str, claimed: Sequence[str]) -> Evidence | None:
    """Compare the costs of a layer with those of QKV's, size by size; those in `claimed` are said to be less."""
    rows = record.rows[record.rows.kv_heads.isna() | (record.rows.kv_heads == record.rows.heads)]
    sizes = rows.set_index(["n", "d"])
    ours, first = sizes[sizes.attention == attention], sizes[sizes.attention == "qkv"]
    if not len(ours):
        return None
    ratios = {name: ours[name] / first[name] for name in COSTS}
    texts = [f"{COSTS[name]} {of.median():.2f} ({of.min():.2f} to {of.max():.2f})" for name, of in ratios.items()]
    text = f"one layer, {label(attention)} / QKV, median (range) of {len(ours)} sizes: {'; '.join(texts)}"
    more = [COSTS[name] for name in claimed if (ratios[name] >= 1).any()]
    return Evidence(text, f"fails: not less {' and '.join(more)} in every size" if more else "holds")


def hidden(record: Record, attentions: Sequence[str]) -> Evidence | None:
    """Test the claim that attentions exceed QKV's perplexity by more over real targets than over all.

    The unit is one per cent of QKV's perplexity; the sample, settings in which targets are in part padding.
    """
    pairs = perplexity_costs(record.rows, "qkv")
    pairs = pairs[pairs.attention.isin(attentions) & (pairs.padding > 0)]
    if not len(pairs):
        return None
    numbers = compare(100 * pairs[REAL], 100 * pairs[COUNTED], pairs.setting)  # all beside one run of QKV
    low, high = numbers.interval()
    real, counted = (f"{100 * pairs[name].mean():+.1f} %" for name in (REAL, COUNTED))
    interval = f" [{low:+.1f}, {high:+.1f}]" if np.isfinite(low) else ""
    text = (
        f"perplexity of {', '.join(map(label, attentions))} beside QKV's: {real} over real targets, {counted} over all "
    )
    text += f"({pairs.padding.mean():.0%} padding); difference {numbers.difference:+.1f}{interval}, {_count(numbers)}"
    judged = verdict(low, high, 0, more_is_better=True)
    verdicts = {"better": "holds", "worse": "fails", "undecided": "undecided"}
    return Evidence(text, verdicts.get(judged, "undecided: too few settings or seeds"))


OF_A_RECORD: dict[str, Callable[..., Evidence | None]] = {
    function.__name__: function for function in (compared, costs, hidden, levels, means, raised)
}


def _read(folder: Path) -> Record | None:
    if (table := folder / f"{folder.name}.csv").is_file():  # of kvt bench
        return Record(pd.read_csv(table), pd.DataFrame())
    if not (folder / MANIFEST).is_file():
        return None
    manifest, rows = read_record(folder)
    grid = read_grid(manifest.grid, manifest.scale)
    outcomes = find_outcomes(grid.runs, (), known=[row.outcome for row in rows])
    grid, _ = best_of(grid, outcomes)
    results = table_of_results(grid, outcomes)
    return Record(results[results.state == State.FINISHED], table_of_histories(grid, outcomes), grid)


def _where(claim: Mapping[str, Any], open_record: Callable[[str], Record | None]) -> Markdown:
    """Return the tests of a claim, or the command that makes its runs, with a link to their record."""
    _, arguments = _evidence(claim)
    if "by" in arguments:
        tests = [test.partition("::") for test in arguments["by"]]
        return Markdown("; ").join(Markdown("[{}](../{})").format(name, path) for path, _, name in tests)
    name = arguments.get("record")
    if name is None or (record := open_record(name)) is None:
        return Markdown("–")
    command, page = f"kvt reproduce {name}", f"{name}.md"
    if record.grid is not None:
        command, page = f"kvt reproduce {record.grid.name} --scale {record.grid.scale}", "report.md"
    return Markdown("[{}](results/{}/{}), `{}`").format(name, name, page, command)
