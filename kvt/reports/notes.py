"""Writes the notes of a report: which runs are missing, costs, failures, and machines of the runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvt.data.published import UNPUBLISHED
from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import finished, untried
from kvt.reports.report import Results, Section
from kvt.reports.tables import counted, label
from kvt.run.config import in_short
from kvt.study.grid import ATTENTIONS, FULL, Grid
from kvt.study.outcomes import TERMINAL, State

MISSING = Markdown("""\
**Runs are missing. Until all have ended, the means of two attentions may be over different settings. The comparisons
use pairs of finished runs only.**""")
SHARE = Markdown("""\
**A part of the grid**: {made} of {wanted} runs ({share:.0f} %) have ended. Of {settings}, {whole} have all runs and
{some} have at least one. Of {seeds}, {missing} have missing runs. A setting is a task with one combination of all
values except attention and seed.""")
COSTS = Markdown("""\
Parameters and training time divided by those of {first}: medians over pairs, and quartiles of the times. The times are
indicative only, because the machine may have done other work. `kvt bench` measures times.""")
REPEATED = Markdown("""\
These runs were repeated with the same settings and seed, for example on another machine or with other versions. The
tables above use only the first result of each run. *identical*: all metrics are equal to six digits. *difference*: the
later result minus the first result, in points.""")
OTHER_DATA = Markdown("""\
**Runs of {task} with equal data settings were trained on different data ({counts}). A difference between them may be
due to the data.**""")
SIX_DIGITS = 5e-6  # the largest relative error of a number with six digits


def notes(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield sections about the runs, costs of attentions, repeated, failed and diverged runs, and machines."""
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


def other_counts(runs: pd.DataFrame) -> list[Markdown]:
    """Return a sentence that lists data sets whose number of examples is not the published number; [] without any."""
    notes = [notes.get(UNPUBLISHED) for notes in runs.get("notes", ()) if isinstance(notes, dict)]
    found = [*dict.fromkeys(filter(None, notes))]
    return [Markdown("**Not the published data**: {}.").format("; ".join(found))] if found else []


def _runs(grid: Grid, results: Results) -> Iterator[Markdown]:
    """Yield paragraphs about the settings that differ from the paper's, and about runs that are missing."""
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


def _other_data(grid: Grid, results: pd.DataFrame) -> Iterator[Markdown]:
    """Yield a warning for each task in which runs with equal data settings were trained on different data."""
    settings = results.task + [str(run.config.data) for run in grid.runs]
    for _, rows in results.reindex(columns=["task", "content"]).groupby(settings, sort=False):
        counts = Counter(rows.content.dropna())
        if len(counts) > 1:
            text = "; ".join(f"{counted(count, 'run')} on {content}" for content, count in counts.items())
            yield OTHER_DATA.format(task=rows.task.iloc[0], counts=text)


def _costs(results: Results) -> Iterator[Section]:
    """Yield the ratios of parameters and times to the first attention. Times are compared on the same machine."""
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
    """Yield the differences between the first results of runs and later results of the same runs."""
    metrics = [name for name in results.repeats if "/" in name]  # including metrics that only some tasks have
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


def _list(lines: Iterable[tuple[str, str]]) -> Markdown:
    return Markdown("\n").join(Markdown("* **{}**: {}").format(name, text) for name, text in lines)


def _measured_on(done: pd.DataFrame) -> dict[str, str]:
    texts = {
        "machine": [_machine(machine) for machine in done.machine],
        "versions": [", ".join(f"{name} {version}" for name, version in found.items()) for found in done.packages],
        "commit of kvt": [commit if isinstance(commit, str) else "unknown" for commit in done.commit],
        "precision": list(done.precision),
    }
    lines = {}
    for name, counts in zip(texts, map(Counter, texts.values()), strict=True):
        each = [v if len(counts) == 1 else f"{v} ({counted(count, 'run')})" for v, count in counts.items()]
        lines[name] = "; ".join(each)
    return {**lines, "training alone": f"{done.seconds.sum() / 3600:.1f} hours, sum over all runs"}


def _machine(machine: Mapping[str, Any]) -> str:
    threads = f"{counted(machine['threads'], 'thread')} a run"
    return ", ".join([f"{machine['processor']} ({machine['system']})", threads, *machine["gpus"]])


def _merged(grid: Grid) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return `Grid.scale_diff`. If a setting has equal entries for all tasks, they are merged into one entry."""
    merged = {}
    for name, values in grid.scale_diff.items():
        axis = name.partition(": ")[2]
        alike = all(other == values for key, other in grid.scale_diff.items() if key.partition(": ")[2] == axis)
        merged[axis if alike else name] = values
    return merged


def _values(name: str, values: Sequence[Any]) -> str:
    if name.endswith(ATTENTIONS):
        return "; ".join(map(label, values)) or "–"
    parts = [
        [f"{k} {v}" for k, v in each.items()] if isinstance(each, dict) else [str(each)]
        for each in map(in_short, values)
    ]
    return ", ".join(map(" ".join, parts))
