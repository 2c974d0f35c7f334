"""The report of a study: Markdown with pictures beside it, an HTML page with them inside, the explorer, two CSVs."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from kvt.reports.explorer import explorer_page
from kvt.reports.figure3 import draw_figure3
from kvt.reports.figures import against, as_pdf, as_svg, bars, curves
from kvt.reports.forest import forest
from kvt.reports.levels import add_cycles, describe_levels, draw_ladder, draw_levels
from kvt.reports.measured import measure
from kvt.reports.names import label
from kvt.reports.padding import describe_costs, draw_costs, perplexity_costs
from kvt.reports.page import html_page, latex_tables, markdown_table
from kvt.reports.statistics import MIN_SAMPLES, NO_DIRECTION
from kvt.reports.tables import (
    CEILING,
    CHANCE,
    NEARLY,
    Table,
    against_of,
    at_the_ceiling,
    cells_of,
    columns_of,
    comparisons_table,
    curves_of,
    finished,
    kind_of,
    maps_of,
    pair_of,
    results_table,
    shares_table,
    steps_table,
    untried,
)
from kvt.run.load_checkpoint import Checkpoint
from kvt.study.grid import ATTENTIONS, FULL, Grid
from kvt.study.outcomes import (
    FAULTY,
    TERMINAL,
    Outcomes,
    State,
    table_of_repeats,
    tally,
)
from kvt.system.errors import UserError
from kvt.system.files import write_atomically
from kvt.system.quoting import Markdown

LEGEND = Markdown("""\
Mean ± standard deviation over settings (of the means over seeds), where there are several; n runs. A point is
{point}. All numbers of the tables are in tables.csv.""")

PUBLISHED = Markdown("""\
*published*: the paper's mean ± standard deviation over settings, where it says so. *difference*: ours less the
published, in points.""")

OTHER_SETTINGS = Markdown("""\
**Ours are not the paper's settings (see above): the difference from the published numbers is that of other
settings, too.**""")

MISSING = Markdown("""\
**Runs are missing: until they are made, the means of two attentions may be over different settings. The
comparisons are not, they are of pairs.**""")

UNTRIED = Markdown("""\
**Not run yet**: {}.""")

PARTIAL = Markdown("""\
**Not all of the data**: with {}.""")

COMPARED = Markdown("""\
Runs are paired by task, settings and seed, so that both have seen the same data in the same order. *n*: left out are
settings in which every run of every attention is within {margin:g} point{s} of the best possible, or no better than
chance, for they tell nothing apart. *difference*: mean over settings, in points{better}, with its 95 % t interval.
The settings are those of this grid, and the sample is one of their seeds, which may move all settings together: the
larger of the standard errors of independent pairs and of seeds counts. With a single seed the sample is one of
settings. *beyond this grid*: the interval if settings are a sample, too. *p (no difference)*: t-test that the mean
difference is 0. *p (TOST)*: two one-sided t-tests that it is beyond ± {margin:g} point{s}. Both p are corrected for all
{tests} comparisons of this page (Holm), intervals are not. *verdict*: "as good" where p (TOST) is below 0.05; else
"better" or "worse" where p (no difference) is; else "undecided", with the smallest margin that contains the interval.
Intervals take differences for normal, and are too narrow where they are strongly skewed. "diverges": more runs of the
first of a pair have diverged than of the other; the pairs that are left are not tested.""")

SOLVED = Markdown("""\
*solved*: how many runs of each of the pair come to {nearly:g} % of the highest value. Where runs are near perfect or
far from it, their mean describes neither: p is that of the sign test over the pairs of which one alone has solved it
(McNemar's exact test), which takes pairs for independent.""")

UNTESTED = Markdown("""\
*difference*: the mean of pairs of runs with the same task, settings and seed, in points{better}. Fewer than {fewest}
settings, or seeds of a single setting, are not tested.""")

UNDIRECTED = Markdown("""\
*direction unknown*: nothing says whether more or less of {metric} is better: write `better: more` or `better: less`
beside its `metric:` in the grid, or make it the `monitor` of the task, with its `mode`.""")

AT_CHANCE = Markdown("""\
*both at chance*: no run is {margin:g} point{s} better than guessing, which tells nothing apart and is not tested.""")

AT_THE_CEILING = Markdown("""\
**At the ceiling**, every run within {margin:g} point{s} of the best possible, which tells nothing apart: {pairs}.""")

STEPS = Markdown("""\
Optimiser steps to {nearly:g} % of the highest value in validation, as often as it was computed: medians over runs; –
unless more than half of them get there.""")

SHARES = Markdown("""\
The share of the runs' variance that is of settings; the rest is of seeds. The larger it is, the more do further
settings tell, and the less further seeds.""")

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

FORMATS = ("latex", "pdf")  # of tables and of pictures, for papers
SIX_DIGITS = 5e-6  # the largest relative error of a number rounded to them


@rc_context({"text.parse_math": False})  # a $ in a name is not TeX
def write_report(
    grid: Grid, outcomes: Outcomes, out: Path, root: Path | None = None, formats: Collection[str] = ()
) -> list[Path]:
    """Write report.md, report.html, explorer.html and two CSVs of a grid, and pictures; return the paths but pictures'.

    Args:
        grid: with its tables.
        outcomes: of its runs.
        out: the folder of the report, made if it does not exist.
        root: the folder of the runs, for pictures that need their checkpoints.
        formats: of `FORMATS`, to write besides.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as in /proc
        raise UserError(f"{out}: cannot create this folder: choose another") from error
    grid, swept, results, histories, tables, family = measure(grid, outcomes)
    repeats = table_of_repeats(grid, outcomes)
    first = results.attention.iloc[0]
    pictures: dict[str, Figure] = {}

    def show(drawn: Mapping[str, Figure | None]) -> list[Markdown]:
        """Return a Markdown image for each figure that is not None."""
        new = {name: figure for name, figure in drawn.items() if figure is not None}
        pictures.update(new)
        return [Markdown("![{}]({}.svg)").format(name.replace("-", " "), name) for name in new]

    law: list[Markdown] = []
    findings: list[Markdown] = []
    known = results[results.state == State.FINISHED]
    if grid.content.get("levels") and len(known):
        known, length = add_cycles(known, grid), grid.runs[0].value("length")
        finding, text, *tables_of_sizes = describe_levels(known, histories, length)
        findings.append(finding)
        drawn = {"levels": draw_levels(known, length), "ladder": draw_ladder(histories, known, length)}
        law = [text, *show(drawn), *tables_of_sizes]
    of_padding: list[Markdown] = []
    if grid.content.get("padding") and len(known) and len(pairs := perplexity_costs(known, first)):
        of_padding = [*describe_costs(pairs, first), *show({"padding": draw_costs(pairs, first)})]
    of_tables, forests, numbers = [], {}, []
    tests = int(family.p_different.notna().sum())
    for number, table in enumerate(tables):
        cells, compared = cells_of(results, table), family[family.table == number].drop(columns="table")
        forests[f"differences-{_slug(table)}"] = forest(compared, table, first)
        of_tables += _text_of_table(grid, cells, table)
        of_tables += _comparisons(first, histories, table, compared, tests)
        findings += _findings(table, compared)
        of_pools = compared[compared.column.isin(table.pools)].assign(metric=table.metric)
        numbers += [cells.merge(compared.drop(columns="settings"), how="left"), of_pools]
    others = show(_pictures(grid, tables, histories, results, root))
    head, *parts = [
        *_head(grid, results, findings),
        *([swept] if swept else []),
        *_other_data(grid, results),
        *law,
        *of_padding,
        *show(forests),
        *of_tables,
    ]
    parts += [Markdown("## Curves and bars"), *others] if others else []
    parts += [*_costs(results), *_repeated(tables, results, repeats), *_tail(results, repeats)]
    text = Markdown("\n\n").join([head, *parts])
    svgs = {name: as_svg(figure) for name, figure in pictures.items()}
    runs = results.drop(columns=["setting", "packages", "machine", "notes"], errors="ignore")
    contents = {
        "report.md": f"{text}\n",
        "explorer.html": explorer_page(grid, outcomes),
        "tables.csv": pd.concat(numbers).to_csv(index=False, float_format="%.6g"),
        "runs.csv": runs.to_csv(index=False, float_format="%.6g"),
    }
    if "latex" in formats:
        contents["tables.tex"] = latex_tables(text)
    links = Markdown("Files: ") + Markdown(", ").join(Markdown("[{}]({})").format(name, name) for name in contents)
    contents["report.html"] = html_page(grid.title, Markdown("\n\n").join([head, links, *parts]), svgs)
    files: dict[str, str | bytes] = {**contents, **{f"{name}.svg": svg for name, svg in svgs.items()}}
    if "pdf" in formats:
        files |= {f"{name}.pdf": as_pdf(figure) for name, figure in pictures.items()}
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in contents]


def _slug(table: Table) -> str:
    return table.metric.replace("/", "-").replace(" ", "-")


def _pictures(
    grid: Grid, tables: Sequence[Table], histories: pd.DataFrame, results: pd.DataFrame, root: Path | None
) -> dict[str, Figure | None]:
    pictures: dict[str, Figure | None] = {}
    if len(histories):
        columns = columns_of(grid, grid.content.get("columns"))
        parts = [histories[histories.name.isin(names)].assign(task=column) for column, names in columns.items()]
        of_columns = pd.concat(parts, ignore_index=True)
        for metrics in curves_of(grid):
            pictures[metrics[0].replace("/", "-")] = curves(of_columns, metrics, kind_of(grid, metrics[0]))
    for (words, setting), table in product(against_of(grid).items(), tables):
        pictures[f"against-{words.replace(' ', '-')}-{_slug(table)}"] = against(results, table, setting, words)
    pictures |= {f"bars-{_slug(table)}": bars(results, table) for table in tables}
    if root is not None and (runs := maps_of(grid)) and (results.state == State.FINISHED).all():
        paths = {cell: run.best_checkpoint(root) for cell, run in runs.items()}
        if all(path.is_file() for path in paths.values()):
            pictures["maps"] = draw_figure3(
                {cell: Checkpoint(paths[cell], run.config.imports) for cell, run in runs.items()}
            )
    return pictures


def _head(grid: Grid, results: pd.DataFrame, findings: Sequence[Markdown]) -> list[Markdown]:
    lines = [Markdown("# {}").format(grid.title), *findings]
    lines.append(Markdown("Scale **{}**: {} {}.").format(grid.scale, grid.about, tally(results.state)))
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
    if unmade := untried(results):
        lines.append(UNTRIED.format("; ".join(map(label, unmade))))
    tried = results[~results.attention.isin(unmade)]
    return lines if set(tried.state) <= set(TERMINAL) else [*lines, MISSING]


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


def _findings(table: Table, compared: pd.DataFrame) -> list[Markdown]:
    """Return a sentence that lists a table's comparisons that have a verdict, and counts the others."""
    found, told = [], ("worse", "better", "as good", "diverges")
    pairs = pd.Series([pair_of(one) for one in compared.itertuples()], compared.index, dtype=str)
    points = compared.column + " " + compared.difference.map(table.kind.points)
    for verdict in told:
        of_pairs = points[compared.verdict == verdict].groupby(pairs, sort=False)
        if where := [f"{pair} ({'; '.join(columns)})" for pair, columns in of_pairs]:
            found.append(Markdown("**{}**: {}").format(verdict, ", ".join(where)))
    untold = compared.verdict[~compared.verdict.isin(told)].value_counts(sort=False)
    if len(untold):
        counts = ", ".join(f"{count} × {verdict}" for verdict, count in untold.items())
        found.append(Markdown("{}: {}").format("others" if found else "no verdict", counts))
    heading = Markdown("In {}: ").format(table.title)
    return [heading + Markdown("; ").join(found) + Markdown(".")] if found else []


def _text_of_table(grid: Grid, cells: pd.DataFrame, table: Table) -> list[Markdown]:
    kind, title = table.kind, table.title
    lines = [Markdown("## {}{}").format(title[0].upper(), title[1:])]
    if table.relabelled:
        lines.append(Markdown("Columns named as the paper prints them:"))
    lines.append(results_table(cells, table))
    if table.relabelled:
        lines += [Markdown("Columns with their right names:"), results_table(cells, table, relabelled=True)]
    lines.append(LEGEND.format(point=kind.point_in_words))
    if table.published:
        lines += [PUBLISHED, *([OTHER_SETTINGS] if grid.scale_diff else [])]
    if table.note:
        lines.append(Markdown("Note: {}").format(table.note))
    if (shares := shares_table(cells, table)) is not None:
        lines += [shares, SHARES]
    return lines


def _comparisons(
    first: str, histories: pd.DataFrame, table: Table, compared: pd.DataFrame, tests: int
) -> list[Markdown]:
    if not len(compared):
        return []
    lines = [Markdown("### Is it as good as {}?").format(label(first))]
    easy = compared.verdict == CEILING
    words: dict[str, Any] = {"margin": table.margin, "s": "" if table.margin == 1 else "s", "tests": tests}
    words |= {"better": "; less is better" * (table.kind.more_is_better is False), "fewest": MIN_SAMPLES}
    if not easy.all():
        tested = compared.p_different.notna().any()
        lines += [comparisons_table(compared[~easy], table.kind), (COMPARED if tested else UNTESTED).format(**words)]
    if compared.solved.notna().any():
        lines.append(SOLVED.format(nearly=100 * NEARLY))
    if (compared.verdict == NO_DIRECTION).any():
        lines.append(UNDIRECTED.format(metric=table.kind.label))
    if (compared.verdict == CHANCE).any():
        lines.append(AT_CHANCE.format(**words))
    if easy.any():
        lines.append(AT_THE_CEILING.format(**words, pairs=at_the_ceiling(compared)))
    shown = [column for column in compared.column[easy | compared.solved.notna()].unique() if column in table.columns]
    if shown and (steps := steps_table(histories, table, shown)) is not None:
        lines += [steps, STEPS.format(nearly=100 * NEARLY)]
    return lines


def _costs(results: pd.DataFrame) -> list[Markdown]:
    """Return parameters and time of each attention divided by the first's, of runs on the same machine."""
    done = results[results.state == State.FINISHED]
    first = results.attention.iloc[0]
    if first not in set(done.attention):
        return []
    done = done.assign(host=[str(machine) for machine in done.machine])
    pair = ["task", "setting", "seed", "host"]
    numbers = done.pivot_table(index=pair, columns="attention", values=["parameters", "seconds"])
    lines = [["", "parameters", "training time"]]
    for attention in dict.fromkeys(done.attention):
        sizes, times = ((numbers[of, attention] / numbers[of, first]).dropna() for of in ("parameters", "seconds"))
        if len(times):
            low, middle, high = times.quantile([0.25, 0.5, 0.75])
            lines.append([label(attention), f"{sizes.median():.2f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"])
    return [Markdown("## Costs"), markdown_table(lines), COSTS.format(first=label(first))]


def _repeated(tables: Sequence[Table], results: pd.DataFrame, repeats: pd.DataFrame) -> list[Markdown]:
    """Return the section on runs that were made again: how far their later results are from the first."""
    if not len(repeats):
        return []
    metrics = [name for name in repeats if "/" in name]  # some only of other tasks
    lines = []
    for table in tables:
        rows = [[table.title, "made again", "identical", "mean difference", "largest, either way"]]
        for column in table.columns:
            again = finished(repeats, table, column)
            first = finished(results, table, column).set_index("name").reindex(again.name)
            if len(again):
                values = (table.kind.scaled(rows[table.metric].to_numpy(float)) for rows in (again, first))
                differences = pd.Series(np.subtract(*values))
                later, before = (rows.reindex(columns=metrics).to_numpy(float) for rows in (again, first))
                same = np.isclose(later, before, rtol=SIX_DIGITS, atol=0, equal_nan=True).all(axis=1).sum()
                largest = f"{abs(differences).max() / table.kind.point:.2f}"
                rows.append([column, str(len(again)), str(same), table.kind.points(differences.mean()), largest])
        lines += [markdown_table(rows)] if len(rows) > 1 else []
    return [Markdown("## Made again"), *lines, REPEATED] if lines else []


def _tail(results: pd.DataFrame, repeats: pd.DataFrame) -> list[Markdown]:
    lines = []
    for state in (*FAULTY, State.DIVERGED):
        rows = results[results.state == state]
        if len(rows):
            about = [(f"{r.task} {label(r.attention)} {r.setting} seed={r.seed}", r.message) for r in rows.itertuples()]
            lines += [Markdown("## {}").format(state.capitalize()), _list(about)]
    made = pd.concat([results, repeats])
    done = made[made.state.isin([State.FINISHED, State.DIVERGED])]
    if len(done):
        lines += [Markdown("## Measured on"), _list(_measured_on(done).items())]
    return lines


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
    parts = [[f"{k} {v}" for k, v in each.items()] if isinstance(each, dict) else [str(each)] for each in values]
    return ", ".join(map(" ".join, parts))
