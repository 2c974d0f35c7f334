"""The sections of a report that grids list by name: tables and comparisons, curves, and notes about the runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import unescape
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvt.data.published import UNPUBLISHED
from kvt.markdown import Markdown, markdown_table
from kvt.reports import figures
from kvt.reports.comparisons import CEILING, LOST, NEARLY, Cell, Compared, cells_of, finished, untried
from kvt.reports.report import Results, Section, measure
from kvt.reports.tables import Table, against_of, columns_of, counted, curves_of, label, metric_of, tasks_of
from kvt.reports.text import (
    at_the_ceiling,
    comparisons_table,
    numbers_of,
    pair_of,
    printed_table,
    results_table,
    steps_table,
)
from kvt.run.config import in_short
from kvt.study.grid import ATTENTIONS, FULL, Grid
from kvt.study.outcomes import TERMINAL, Outcomes, State

LEGEND = Markdown(Path(__file__).with_name("legend.md").read_text("utf-8").strip())
OTHER_SETTINGS = Markdown("""\
**Our settings differ from the paper's (see Runs). They contribute to the difference from the published numbers.**""")
JUDGED = Markdown("""\
*as good*: the 90 % interval is within ± {margins}. *p* is corrected for the {tests} of this report that have a p.""")
AT_THE_CEILING = Markdown("**At the ceiling** (not tested): {}.")
STEPS = Markdown("""\
The training step at which validation first finds {nearly:g} % of the highest possible value: medians over runs. A dash:
half of the runs or fewer reach it.""")
MISSING = Markdown("""\
**Runs are missing. Until all have ended, the means of two attentions may be over different settings.**""")
SHARE = Markdown("""\
**A part of the grid**: {made} of {wanted} runs ({share:.0f} %) have ended. Of {settings}, {whole} have all runs and
{some} have at least one. Of {seeds}, {missing} have missing runs. A setting is a task with one combination of all
values except attention and seed.""")
COSTS = Markdown("""\
Parameters and training time divided by those of {first}: medians over pairs, and quartiles of the times. The times are
indicative only, because the machine may have done other work. `kvt bench` measures times.""")
REPEATED = Markdown("""\
These runs were repeated with the same settings and seed. The tables above use only the first result of each run.
*identical*: all metrics are equal to six digits. *difference*: the later result minus the first result, in points.""")
OTHER_DATA = Markdown("""\
**Runs of {task} with equal data settings were trained on different data ({counts}). A difference between them may be
due to the data.**""")
SIX_DIGITS = 5e-6  # the largest relative error of a number rounded to six digits


def tables(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section for each table, with its results and comparisons, then one section with a common legend."""
    for number, table in enumerate(results.tables):
        cells = cells_of(results.runs, table)
        compared = [one for one in results.compared if one.table == number]
        text = [*_results(grid, results, cells, compared, table), *_comparisons(results, table, compared)]
        drawn = _known({f"differences-{_slug(table)}": figures.forest(compared, table, results.first)})
        yield Section(f"{table.title[0].upper()}{table.title[1:]}", text, numbers_of(cells, compared, table), drawn)
    if results.tables:
        yield Section("How to read the tables", [LEGEND.format(nearly=100 * NEARLY)])


def _results(
    grid: Grid, results: Results, cells: Sequence[Cell], compared: Sequence[Compared], table: Table
) -> Iterator[Markdown]:
    yield results_table(cells, table, compared)
    less = "; less is better" * (table.kind.better == "less")
    yield Markdown("A point is {}{}.").format(table.kind.point_in_words, less)
    yield from summary(table, compared)
    if table.published and grid.scale_diff:
        yield OTHER_SETTINGS
    if table.note:
        yield Markdown("Note: {}").format(table.note)
    if table.printed:
        yield Markdown("The published numbers in the columns that the paper prints:")
        yield printed_table(table)
    yield from _other_counts(results.runs[results.runs.name.isin(frozenset().union(*table.columns.values()))])


def _other_counts(runs: pd.DataFrame) -> list[Markdown]:
    """Return a list with a sentence on data sets whose sizes differ from the published sizes; [] if none differ."""
    notes = [notes.get(UNPUBLISHED) for notes in runs.get("notes", ()) if isinstance(notes, dict)]
    found = [*dict.fromkeys(filter(None, notes))]
    return [Markdown("**Not the published data**: {}.").format("; ".join(found))] if found else []


def summary(table: Table, compared: Sequence[Compared]) -> list[Markdown]:
    """Return a list with a sentence about the verdicts of a table's comparisons; [] if there are no verdicts."""
    found, told = [], ("worse", "better", "as good", LOST)
    for verdict in told:
        those = [one for one in compared if one.verdict == verdict]
        texts = [f"{pair_of(one)} ({one.column} {table.kind.points(one.difference)})" for one in those]
        found += [Markdown("**{}**: {}").format(verdict, ", ".join(texts))] if texts else []
    if untold := Counter(one.verdict for one in compared if one.verdict and one.verdict not in told):
        counts = ", ".join(f"{count} × {verdict}" for verdict, count in untold.items())
        found.append(Markdown("{}: {}").format("others" if found else "no verdict", counts))
    heading = Markdown("In {}: ").format(table.title)
    return [heading + Markdown("; ").join(found) + Markdown(".")] if found else []


def _comparisons(results: Results, table: Table, compared: Sequence[Compared]) -> Iterator[Markdown]:
    if not compared:
        return
    yield Markdown("### Is it as good as {}?").format(label(results.first))
    easy, others = ([one for one in compared if (one.verdict == CEILING) is at_ceiling] for at_ceiling in (True, False))
    if others:
        yield comparisons_table(others, table.kind)
    if margins := {one.margin: pair_of(one) for one in others if isfinite(one.p)}:
        pairs = [f"{margin:g} ({pair})" * (len(margins) > 1) or f"{margin:g}" for margin, pair in margins.items()]
        tests = counted(sum(isfinite(one.p) for one in results.compared), "comparison")
        yield JUDGED.format(tests=tests, margins=" or ± ".join(pairs))
    if easy:
        yield AT_THE_CEILING.format(at_the_ceiling(compared))
    of_either = {one.column for one in compared if one.verdict == CEILING or isfinite(one.solved)}
    shown = [column for column in table.columns if column in of_either]
    if shown and (steps := steps_table(results.histories, table, shown)) is not None:
        yield steps
        yield STEPS.format(nearly=100 * NEARLY)


def curves(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section with learning curves, metrics against settings, and bars; nothing if there are no figures."""
    drawn: dict[str, Figure | None] = {}
    if len(histories := results.histories):
        columns = columns_of(grid, grid.file.columns)
        parts = [histories[histories.name.isin(names)].assign(task=column) for column, names in columns.items()]
        of_columns = pd.concat(parts, ignore_index=True)
        for metrics in curves_of(grid):
            kind = metric_of(metrics[0], tasks_of(grid))
            drawn[metrics[0].replace("/", "-")] = figures.curves(of_columns, metrics, kind)
    for (words, setting), table in product(against_of(grid).items(), results.tables):
        name = f"against-{words.replace(' ', '-')}-{_slug(table)}"
        drawn[name] = figures.against(results.runs, table, setting, words)
    drawn |= {f"bars-{_slug(table)}": figures.bars(results.runs, table) for table in results.tables}
    if known := _known(drawn):
        yield Section("Curves and bars", figures=known)


def notes(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield sections about runs, costs, repeated runs, failed runs, diverged runs, and machines, unless empty."""
    if lines := [*_runs(grid, results)]:
        yield Section("Runs", lines)
    yield from _costs(results)
    yield from _repeated(results)
    for state in (State.FAILED, State.DIVERGED):
        rows = results.runs[results.runs.state == state]
        if len(rows):
            about = [(f"{r.task} {label(r.attention)} {r.setting} seed={r.seed}", r.message) for r in rows.itertuples()]
            yield Section(state.capitalize(), [_list(about)])
    made = pd.concat([results.runs, results.repeats])
    done = made[made.state.isin([State.FINISHED, State.DIVERGED])]
    if len(done):
        yield Section("Measured on", [_list(_measured_on(done).items())])


def _runs(grid: Grid, results: Results) -> Iterator[Markdown]:
    if grid.scale_diff:
        cut = [[name, _values(name, ours), _values(name, full)] for name, (ours, full) in _merged(grid).items()]
        yield markdown_table([["", grid.scale, FULL], *cut])
    parts = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
    limits = {f"{name} {value}" for run in grid.runs for name in parts if (value := run.value(name)) is not None}
    if limits:
        yield Markdown("**Not all of the data**: the runs have {}.").format(", ".join(sorted(limits)))
    if unmade := untried(results.runs):
        yield Markdown("**Not run yet**: {}.").format("; ".join(map(label, unmade)))
    if (made := results.runs.state.isin(TERMINAL)).any() and not made.all():
        of_settings = made.groupby(results.runs.task + " " + results.runs.setting)
        of_seeds = made.groupby(results.runs.seed)
        yield SHARE.format(
            **{"made": made.sum(), "wanted": len(made), "share": 100 * made.mean()},
            **{"settings": counted(of_settings.ngroups, "setting"), "seeds": counted(of_seeds.ngroups, "seed")},
            **{"whole": of_settings.all().sum(), "some": of_settings.any().sum(), "missing": (~of_seeds.all()).sum()},
        )
    if not made[~results.runs.attention.isin(unmade)].all():
        yield MISSING
    if results.swept:
        yield results.swept
    yield from _other_data(grid, results.runs)


def _merged(grid: Grid) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return `Grid.scale_diff` with one entry "<setting>" for all entries "<task>: <setting>" if these are equal."""
    merged = {}
    for name, values in grid.scale_diff.items():
        axis = name.partition(": ")[2]
        alike = all(other == values for key, other in grid.scale_diff.items() if key.partition(": ")[2] == axis)
        merged[axis if alike else name] = values
    return merged


def _values(name: str, values: Sequence[Any]) -> str:
    if name.endswith(ATTENTIONS):
        return "; ".join(map(label, values)) or "–"
    short = map(in_short, values)
    return ", ".join(" ".join(f"{k} {v}" for k, v in x.items()) if isinstance(x, dict) else str(x) for x in short)


def _other_data(grid: Grid, results: pd.DataFrame) -> Iterator[Markdown]:
    """Yield a warning for each group of runs with equal task and data settings, but different training data."""
    settings = results.task + [str(run.config.data) for run in grid.runs]
    for _, rows in results.reindex(columns=["task", "content"]).groupby(settings, sort=False):
        counts = Counter(rows.content.dropna())
        if len(counts) > 1:
            text = "; ".join(f"{counted(count, 'run')} on {content}" for content, count in counts.items())
            yield OTHER_DATA.format(task=rows.task.iloc[0], counts=text)


def _costs(results: Results) -> Iterator[Section]:
    done, first = results.finished, results.first
    if first not in set(done.attention):
        return
    done = done.assign(host=[str(machine) for machine in done.machine])
    pair = ["task", "setting", "seed", "host"]
    numbers = done.pivot_table(index=pair, columns="attention", values=["parameters", "seconds"])
    lines = [["", "parameters", "training time"]]
    for attention in dict.fromkeys(done.attention):
        sizes, times = ((numbers[of, attention] / numbers[of, first]).dropna() for of in ("parameters", "seconds"))
        if len(times):
            low, middle, high = times.quantile([0.25, 0.5, 0.75])
            lines.append([label(attention), f"{sizes.median():.2f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"])
    yield Section("Costs", [markdown_table(lines), COSTS.format(first=label(first))])


def _repeated(results: Results) -> Iterator[Section]:
    metrics = [name for name in results.repeats if "/" in name]
    lines = []
    for table in results.tables if len(results.repeats) else ():
        rows = [[table.title, "repeated runs", "identical", "mean difference", "largest absolute difference"]]
        for column in table.columns:
            again = finished(results.repeats, table, column)
            first = finished(results.runs, table, column).set_index("name").reindex(again.name)
            if len(again):
                values = (table.kind.scaled(rows[table.metric].to_numpy(float)) for rows in (again, first))
                differences = pd.Series(np.subtract(*values))
                later, before = (rows.reindex(columns=metrics).to_numpy(float) for rows in (again, first))
                same = np.isclose(later, before, rtol=SIX_DIGITS, atol=0, equal_nan=True).all(axis=1).sum()
                largest = f"{abs(differences).max() / table.kind.point:.2f}"
                rows.append([column, str(len(again)), str(same), table.kind.points(differences.mean()), largest])
        lines += [markdown_table(rows)] if len(rows) > 1 else []
    if lines:
        yield Section("Repeated runs", [*lines, REPEATED])


def _measured_on(done: pd.DataFrame) -> dict[str, str]:
    machines = [(f"{m['processor']} ({m['system']})", counted(m["threads"], "thread"), m["gpus"]) for m in done.machine]
    texts = {
        "machine": [", ".join([where, f"{threads} a run", *gpus]) for where, threads, gpus in machines],
        "versions": [", ".join(f"{name} {version}" for name, version in found.items()) for found in done.packages],
        "commit of kvt": [commit if isinstance(commit, str) else "unknown" for commit in done.commit],
        "precision": list(done.precision),
    }
    lines = {}
    for name, counts in zip(texts, map(Counter, texts.values()), strict=True):
        each = [v if len(counts) == 1 else f"{v} ({counted(count, 'run')})" for v, count in counts.items()]
        lines[name] = "; ".join(each)
    return {**lines, "training alone": f"{done.seconds.sum() / 3600:.1f} hours, sum over all runs"}


def _list(lines: Iterable[tuple[str, str]]) -> Markdown:
    return Markdown("\n").join(Markdown("* **{}**: {}").format(name, text) for name, text in lines)


def verdicts(grid: Grid, outcomes: Outcomes) -> Iterator[str]:
    """Yield lines for a terminal: for each table, our means beside the published means, and the `summary`."""
    _, results = measure(grid, outcomes)
    for number, table in enumerate(results.tables):
        cells = [cell for cell in cells_of(results.runs, table) if cell.runs and isfinite(cell.published_mean)]
        for cell in cells:
            ours, theirs = (table.kind.value(mean) for mean in (cell.mean, cell.published_mean))
            yield f"{table.title}, {cell.column}, {label(cell.attention)}: {ours}, n = {cell.runs}; the paper: {theirs}"
        for finding in summary(table, [one for one in results.compared if one.table == number]):
            yield unescape(finding.replace("**", ""))


def _slug(table: Table) -> str:
    return table.metric.replace("/", "-").replace(" ", "-")


def _known(drawn: dict[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in drawn.items() if figure is not None}
