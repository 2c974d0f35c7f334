"""What a report says of the runs behind it: how much of the grid they are, their costs, failures and machines."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvt.data.published import UNPUBLISHED
from kvt.reports.comparisons import finished, untried
from kvt.reports.names import label
from kvt.reports.results import Results
from kvt.reports.section import Section
from kvt.run.config import in_short
from kvt.study.grid import ATTENTIONS, FULL, Grid
from kvt.study.outcomes import FAULTY, TERMINAL, State, tally
from kvt.system.quoting import Markdown, markdown_table

MISSING = Markdown("""\
**Runs are missing: until they are made, the means of two attentions may be over different settings. The
comparisons are not, they are of pairs.**""")

SHARE = Markdown("""\
**A part of the grid**: {made} of {wanted} runs ({share:.0f} %). All runs are made in {whole} of {cells} settings, some
in {some} of them; a setting is one of a task.""")

UNTRIED = Markdown("""\
**Not run yet**: {}.""")

PARTIAL = Markdown("""\
**Not all of the data**: with {}.""")

OTHER_COUNTS = Markdown("""\
**Not the published data**: {}.""")

COSTS = Markdown("""\
By those of {first}, medians of pairs; of the times the quartiles, too. They are of training alone, as the runs
came, beside whatever else the machine had to do: `kvt bench` measures.""")

REPEATED = Markdown("""\
Runs that were made more than once, with the same settings and seed: on other machines, with other versions, or
again. Only each one's first result counts above. *identical*: with every metric the same to six digits.
*difference*: the later result less the first, in points.""")

OTHER_DATA = Markdown("""\
**Runs of {task} with the same settings of the data were made on data that differ ({counts}): a difference between
them may be one of the data.**""")

SIX_DIGITS = 5e-6  # the largest relative error of a number rounded to them


def scope(grid: Grid, results: Results) -> list[Markdown]:
    """Return paragraphs on how much of the grid was run, and of the paper's; every report begins with them."""
    lines = [Markdown("Scale **{}**: {} {}.").format(grid.scale, grid.about, tally(results.runs.state))]
    if grid.scale_diff:
        cut = [[name, _values(name, ours), _values(name, full)] for name, (ours, full) in _merged(grid).items()]
        lines.append(markdown_table([["", grid.scale, FULL], *cut]))
    limits = {
        f"{name} {value}"
        for run in grid.runs
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches")
        if (value := run.value(name)) is not None
    }
    lines += [PARTIAL.format(", ".join(sorted(limits)))] if limits else []
    if unmade := untried(results.runs):
        lines.append(UNTRIED.format("; ".join(map(label, unmade))))
    lines += _share(results.runs)
    tried = results.runs[~results.runs.attention.isin(unmade)]
    lines += [] if set(tried.state) <= set(TERMINAL) else [MISSING]
    lines += [results.swept] if results.swept else []
    return [*lines, *other_counts(results.runs), *_other_data(grid, results.runs)]


def other_counts(runs: pd.DataFrame) -> list[Markdown]:
    """Return a sentence on the known data sets of which runs had other numbers of examples than published, if any."""
    notes = [notes.get(UNPUBLISHED) for notes in runs.get("notes", ()) if isinstance(notes, dict)]
    return [OTHER_COUNTS.format("; ".join(found))] if (found := [*dict.fromkeys(filter(None, notes))]) else []


def _share(runs: pd.DataFrame) -> list[Markdown]:
    """Return a paragraph on how much of the grid was run; none if there are no runs, or all of them."""
    made = runs.state.isin(TERMINAL)
    if made.all() or not made.any():
        return []
    of_settings = made.groupby(runs.task + " " + runs.setting)
    whole, some = int(of_settings.all().sum()), int(of_settings.any().sum())
    counts = {"made": made.sum(), "wanted": len(runs), "share": 100 * made.mean()}
    return [SHARE.format(**counts, whole=whole, some=some, cells=of_settings.ngroups)]


def notes(grid: Grid, results: Results) -> Iterator[Section]:
    """Say what the attentions cost, what differed when runs were made again, which failed, and where all were made."""
    yield from _costs(results)
    yield from _repeated(results)
    for state in (*FAULTY, State.DIVERGED):
        rows = results.runs[results.runs.state == state]
        if len(rows):
            about = [(f"{r.task} {label(r.attention)} {r.setting} seed={r.seed}", r.message) for r in rows.itertuples()]
            yield Section(state.capitalize(), [_list(about)])
    made = pd.concat([results.runs, results.repeats])
    done = made[made.state.isin([State.FINISHED, State.DIVERGED])]
    if len(done):
        yield Section("Measured on", [_list(_measured_on(done).items())])


def _other_data(grid: Grid, results: pd.DataFrame) -> list[Markdown]:
    """Return a warning for each task whose runs were made on different data although their data settings are equal."""
    lines = []
    settings = results.task + [str(run.config.data) for run in grid.runs]
    for _, rows in results.reindex(columns=["task", "content"]).groupby(settings, sort=False):
        counts = Counter(rows.content.dropna())
        if len(counts) > 1:
            text = "; ".join(f"{count} run{'s' * (count > 1)} on {content}" for content, count in counts.items())
            lines.append(OTHER_DATA.format(task=rows.task.iloc[0], counts=text))
    return lines


def _costs(results: Results) -> Iterator[Section]:
    """Yield parameters and time of each attention divided by the first's, of runs on the same machine."""
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
    """Yield how far later results of runs that were made again are from the first."""
    metrics = [name for name in results.repeats if "/" in name]  # some only of other tasks
    lines = []
    for table in results.tables if len(results.repeats) else ():
        rows = [[table.title, "made again", "identical", "mean difference", "largest, either way"]]
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
        yield Section("Made again", [*lines, REPEATED])


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
        lines[name] = "; ".join(v if len(counts) == 1 else f"{v} ({count} runs)" for v, count in counts.items())
    return {**lines, "training alone": f"{done.seconds.sum() / 3600:.1f} hours, all runs added up"}


def _machine(machine: Mapping[str, Any]) -> str:
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)} a run"
    return ", ".join([f"{machine['processor']} ({machine['system']})", threads, *machine["gpus"]])


def _merged(grid: Grid) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return `Grid.scale_diff` with the entries of a setting merged into one if they are equal for all tasks."""
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
