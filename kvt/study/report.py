"""The report of a study: Markdown with pictures beside it, the same as one HTML page, and the results as CSV."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markdown import markdown
from matplotlib.figure import Figure

from kvt.errors import UserError
from kvt.figure3 import draw_figure3
from kvt.files import atomically
from kvt.study.figures import as_svg, bars, loss_curves, metric_curves
from kvt.study.grid import FULL, Grid
from kvt.study.names import Metric, in_words, label
from kvt.study.results import KEPT, table_of_histories, table_of_results
from kvt.study.statistics import FEWEST, RESAMPLES
from kvt.study.tables import (
    Table,
    columns_of,
    comparisons,
    finished,
    markdown_of_comparisons,
    markdown_of_results,
    markdown_table,
    tables_of,
)
from kvt.study.work import DONE, State, tally

LEGEND = """\
Mean ± standard deviation over settings (of the means over seeds) ± standard deviation over the seeds of a
setting (pooled); n runs; – where there is one setting or one seed only. A point is {point}."""

PUBLISHED = """\
*published*: the paper's mean ± standard deviation over settings, where it says so. *difference*: ours less the
published, in points."""

OTHER_SETTINGS = """\
**Ours are not the paper's settings (see above): the difference from the published numbers is that of other
settings, too.**"""

MISSING = """\
**Runs are missing: until they are made, the means of two attentions may be over different settings. The
comparisons are not, they are of pairs.**"""

COMPARED = """\
Each attention against {first}: runs are paired by task, settings and seed, so that both have seen the same data
in the same order. *difference*: mean over settings, in points{better}. *95 % interval*: bootstrap over
settings, {resamples:,} resamples, of this line alone. *p (different)*: t-test that the settings' mean
difference is 0. *p (equal)*: two one-sided t-tests that it is beyond ± {margin:g} point{s}. Both are corrected
for the number of lines that are tested, {tests} (Holm); fewer than {fewest} settings, or seeds where there is
one setting, are not tested. *verdict*: "as good" where p (equal) is below 0.05; else "better" or "worse" where
p (different) is; else "undecided". "both at the ceiling": every run is within {margin:g} point{s} of the best
possible, the task is too easy here to tell them apart and is not tested. "diverges": more of its runs than of
{first}'s have diverged."""

COSTS = """\
By those of {first}, medians of pairs; of the times the quartiles, too. They are of training alone, as the runs
came, beside whatever else the machine had to do: `kvt bench` measures. Of a fleet each run has its share; only runs of
fleets of one size are paired."""

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #888; }
td:first-child { position: sticky; left: 0; background: #fff; }
svg { max-width: 100%; height: auto; }
code { background: #f3f3f3; padding: 0 .2em; }
@media print { body { margin: 0; max-width: none; } table { display: table; page-break-inside: avoid; } }"""


class Written(NamedTuple):
    """The files of a report."""

    markdown: Path
    html: Path
    csv: Path


def write_report(grid: Grid, root: Path, out: Path, margin: float) -> Written:
    """Writes the report of what a grid's runs have left behind so far.

    Args:
        grid: which runs.
        root: the folder of all runs.
        out: a folder for report.md, report.html, results.csv and the pictures.
        margin: how many points still count as equal.

    Raises:
        UserError: there can be no such folder.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as in /proc, where its owner alone makes folders
        raise UserError(f"{out}: no folder can be made there: name another") from error
    results = table_of_results(grid, root)
    tables = tables_of(grid)
    pictures = _pictures(grid, root, results, tables)
    drawn = {name: as_svg(picture) for name, picture in pictures.items()}
    for name, svg in drawn.items():
        _write(out / f"{name}.svg", svg)
    middle = ["## Curves and bars", PICTURES] if pictures else []
    parts = [*_head(grid, results), *_body(grid, results, tables, margin), *middle, *_costs(results), *_tail(results)]
    text = "\n\n".join(part for part in parts if part)
    shown = "\n\n".join(f"![{_words(name)}]({name}.svg)" for name in pictures)
    written = Written(out / "report.md", out / "report.html", out / "results.csv")
    _write(written.markdown, text.replace(PICTURES, shown) + "\n")
    inlined = "\n".join(f"<figure>\n{svg}\n</figure>" for svg in drawn.values())
    page = markdown(text, extensions=["tables"]).replace(f"<p>{PICTURES}</p>", inlined)
    _write(written.html, _page(str(grid.content.get("title", grid.name)), page))
    _write(written.csv, _csv(results))
    return written


PICTURES = "(pictures)"


def _pictures(grid: Grid, root: Path, results: pd.DataFrame, tables: Sequence[Table]) -> dict[str, Figure]:
    """By file name: loss curves, other curves that are there, bars."""
    histories = table_of_histories(grid, root)
    pictures: dict[str, Figure | None] = {}
    if len(histories):
        columns = columns_of(grid, grid.content.get("columns"))
        parts = [histories[histories.name.isin(names)].assign(task=column) for column, names in columns.items()]
        histories = pd.concat(parts, ignore_index=True)
        shown = [column for column in columns if (histories.task == column).any()]
        pictures["loss"] = loss_curves(histories, shown)
        for metric in ("val/acc", "val/bleu"):
            pictures[metric.replace("/", "-")] = metric_curves(histories, metric, shown)
    for table in tables:
        done = {column: finished(results, table, column) for column in table.columns}
        if done := {column: rows for column, rows in done.items() if len(rows)}:
            pictures[f"bars-{table.metric.replace('/', '-')}"] = bars(results, table.metric, done, table.published)
    if grid.content.get("maps"):
        checkpoints = {(run.task, run.attention): run.folder(root) / "checkpoints" / "best.ckpt" for run in grid.runs}
        if all(path.is_file() for path in checkpoints.values()):
            pictures["maps"] = draw_figure3(checkpoints)
    return {name: picture for name, picture in pictures.items() if picture is not None}


def _head(grid: Grid, results: pd.DataFrame) -> list[str]:
    lines = [
        f"# {grid.content.get('title', grid.name)}",
        f"Scale **{grid.scale}**: {' '.join(grid.about.split())} {tally(results.state)}.",
    ]
    if grid.cut:
        cut = [[name, _list(ours), _list(full)] for name, (ours, full) in _merged(grid).items()]
        lines.append(markdown_table([["", grid.scale, FULL], *cut]))
    return lines


def _body(grid: Grid, results: pd.DataFrame, tables: Sequence[Table], margin: float) -> list[str]:
    lines = []
    if not set(results.state) <= set(DONE):
        lines.append(MISSING)
    for table in tables:
        title = in_words(table.metric)
        lines.append(f"## {title[0].upper()}{title[1:]}")
        if table.relabelled:
            lines += ["Columns named as the paper prints them:", markdown_of_results(results, table)]
            lines += ["Columns with their right names:", markdown_of_results(results, table, relabelled=True)]
        else:
            lines.append(markdown_of_results(results, table))
        lines.append(LEGEND.format(point=_point(table.kind)))
        if table.published:
            lines += [PUBLISHED, *([OTHER_SETTINGS] if grid.cut else [])]
        lines += [table.note, *_comparisons(results, table, margin)]
    return lines


def _comparisons(results: pd.DataFrame, table: Table, margin: float) -> list[str]:
    if not (compared := comparisons(results, table, margin)):
        return []
    first = label(results.attention.iloc[0])
    explained = COMPARED.format(
        first=first,
        better="" if table.kind.more_is_better else "; less is better",
        resamples=RESAMPLES,
        margin=margin,
        s="" if margin == 1 else "s",
        tests=sum(isfinite(one.different) for one in compared),
        fewest=FEWEST,
    )
    return [f"### Is it as good as {first}?", markdown_of_comparisons(compared, table.kind), explained]


def _point(kind: Metric) -> str:
    return f"{kind.point:g} of {kind.label}" if kind.point != 1 else f"1 {kind.label}"


def _costs(results: pd.DataFrame) -> list[str]:
    """Parameters and time, beside those of the first attention on the same machine."""
    done = results[results.state == State.FINISHED]
    first = results.attention.iloc[0]
    if first not in set(done.attention):
        return []
    done = done.assign(host=[str(machine) for machine in done.machine])
    numbers = done.pivot_table(
        index=["task", "setting", "seed", "host", "fleet"], columns="attention", values=["parameters", "seconds"]
    )
    lines = [["", "parameters", "training time"]]
    for attention in dict.fromkeys(done.attention):
        sizes, times = (
            (numbers[what, attention] / numbers[what, first]).dropna() for what in ("parameters", "seconds")
        )
        if len(times):
            low, middle, high = times.quantile([0.25, 0.5, 0.75])
            lines.append([label(attention), f"{sizes.median():.2f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"])
    return ["## Costs", markdown_table(lines), COSTS.format(first=label(first))]


def _tail(results: pd.DataFrame) -> list[str]:
    lines = []
    for state in (State.FAILED, State.DAMAGED, State.DIVERGED):
        rows = results[results.state == state]
        if len(rows):
            lines.append(f"## {state.capitalize()}")
            lines.append(
                "\n".join(
                    f"* {r.task} {r.attention} {r.setting} seed={r.seed}: `{r.message}`" for r in rows.itertuples()
                )
            )
    done = results[results.state.isin([State.FINISHED, State.DIVERGED])]
    if len(done):
        lines += ["## Measured on", "\n".join(f"* {line}" for line in _measured_on(done))]
    return lines


def _measured_on(done: pd.DataFrame) -> list[str]:
    """Each machine, version, commit and precision, with the number of runs if there are several."""
    texts = {
        "machine": [_machine(machine) for machine in done.machine],
        "versions": [
            ", ".join(f"{name} {version}" for name, version in packages.items()) for packages in done.packages
        ],
        "commit of kvt": [str(commit) for commit in done.commit],
        "precision": list(done.precision),
    }
    lines = []
    for name, values in texts.items():
        counts = Counter(values)
        shown = [value if len(counts) == 1 else f"{value} ({count} runs)" for value, count in counts.items()]
        lines.append(f"{name}: {'; '.join(shown)}")
    return [*lines, f"training alone took {done.seconds.sum() / 3600:.1f} hours, all runs added up"]


def _machine(machine: Mapping[str, Any]) -> str:
    threads = machine["threads"]
    return ", ".join(
        [
            f"{machine['processor']} ({machine['system']})",
            f"{threads} thread{'s' * (threads > 1)} a run",
            *machine["gpus"],
        ]
    )


def _merged(grid: Grid) -> dict[str, tuple[list[Any], list[Any]]]:
    """The cut axes; an axis that is cut alike in every task once."""
    merged: dict[str, tuple[list[Any], list[Any]]] = {}
    for name, values in grid.cut.items():
        axis = name.partition(": ")[2]
        alike = [other for key, other in grid.cut.items() if key.partition(": ")[2] == axis]
        merged[axis if all(other == values for other in alike) else name] = values
    return merged


def _list(values: Sequence[Any]) -> str:
    texts = [
        " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value) for value in values
    ]
    return ", ".join(texts)


def _csv(results: pd.DataFrame) -> str:
    kept = [
        name
        for name in results
        if name not in {*KEPT, "setting"} - {"parameters", "seconds", "fleet", "precision", "commit"}
    ]
    text: str = results[kept].to_csv(index=False, float_format="%.6g")
    return text


def _words(name: str) -> str:
    return name.replace("-", " ")


def _page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _write(path: Path, text: str) -> None:
    with atomically(path) as part:
        part.write_text(text, encoding="utf-8")
