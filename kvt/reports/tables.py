"""The tables of a study: our results beside the published ones, and each attention compared with the first."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from math import inf, isfinite, isnan, nan
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvt.reports.names import declared, in_words, label, metric_of
from kvt.reports.statistics import compare, compare_shares, holm, summarise, verdict
from kvt.study.grid import Columns, Grid, Run, TableEntry
from kvt.study.outcomes import State
from kvt.system.errors import unknown
from kvt.system.quoting import Markdown, markdown_table
from kvt.tasks.metrics import Metric

Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""By attention and column: mean and standard deviation over settings, which may be NaN."""

CEILING, CHANCE, SILENT = "both at the ceiling", "both at chance", "at the ceiling or at chance"
NEARLY = 0.99  # of the highest value


class Table(NamedTuple):
    metric: str  # such as "test/acc"; a column of results
    kind: Metric
    columns: Mapping[str, frozenset[str]]  # the names of the runs of each column
    published: Published = MappingProxyType({})
    relabelled: Mapping[str, str] = MappingProxyType({})  # the right name of each column that the paper mislabels
    note: str = ""
    chance: Mapping[str, float] = MappingProxyType({})  # the value of guessing in each run for which it is known
    margin: float = 1.0  # differences below it count as equal, in points
    solved: Collection[str] = ()  # columns in which runs count as solved or not, by `NEARLY` the highest value
    pools: Mapping[str, frozenset[str]] = MappingProxyType({})  # runs of several columns, compared besides
    pairs: Sequence[tuple[str, str]] = ()  # of attentions, compared besides each with the first
    over_training: str = ""  # the metric whose mean over a run's validations this is

    @property
    def title(self) -> str:
        mean = ", mean over training" * bool(self.over_training)
        return in_words(self.over_training or self.metric, self.kind) + mean

    @property
    def reach(self) -> float:
        """The margin in units of the metric, or of its logarithm."""
        return self.margin * self.kind.point

    def chance_in(self, column: str) -> float | None:
        """Return the value of guessing in a column or pool, the least of its runs; None unless it is known for all."""
        names = self.names(column)
        return min(self.chance[name] for name in names) if names and names <= self.chance.keys() else None

    def names(self, column: str) -> frozenset[str]:
        """Return the names of the runs of a column or pool."""
        return self.columns[column] if column in self.columns else self.pools.get(column, frozenset())

    def runs(self, results: pd.DataFrame, column: str) -> pd.DataFrame:
        """Return the rows of a column or pool."""
        return results[results.name.isin(self.names(column))]

    @property
    def published_right(self) -> Published:
        return {
            attention: {self.relabelled.get(column, column): value for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


def columns_of(grid: Grid, columns: Columns) -> dict[str, frozenset[str]]:
    """Return the names of the runs of each column; raise UserError for one that has no runs at any scale."""
    if columns is None or isinstance(columns, list):
        columns = {task: {"task": task} for task in columns or [run.task for run in grid.runs]}
    found, names = {}, {run.name for run in grid.runs}
    for column, wanted in columns.items():
        runs: Sequence[Run] = grid.of_all_scales
        for name, value in wanted.items():
            if not (having := [run for run in runs if name in run.values]):
                raise unknown(f"setting in columns of {grid.name}:", name, sorted(runs[0].values))
            if not (runs := [run for run in having if _same(run.value(name), value)]):
                known = dict.fromkeys(str(run.value(name)) for run in having)
                raise unknown(f"{name} in columns of {grid.name}, {column}:", value, known)
        found[column] = frozenset(run.name for run in runs) & names
    return found


def tables_of(grid: Grid) -> list[Table]:
    """Return the tables that a grid asks for, without columns that have neither runs nor published numbers."""
    columns_of(grid, grid.file.columns)  # the curves have them, too
    return [table for entry in grid.file.tables if (table := _table(grid, entry)).columns]


def curves_of(grid: Grid) -> list[list[str]]:
    """Return the figures of learning curves that a grid asks for, each as its metrics, the main one first."""
    known = [f"{stage}/{metric}" for stage in ("val", "train") for metric in _metrics_of(grid)]
    _require(f"metric in curves of {grid.name}:", chain.from_iterable(grid.file.curves), known)
    return grid.file.curves


def _require(what: str, names: Iterable[str], known: Collection[str]) -> None:
    if strange := [name for name in names if name not in known]:
        raise unknown(what, strange[0], dict.fromkeys(known))


def _metrics_of(grid: Grid) -> list[str]:
    """Return the names of kvt's metrics, and of those that tasks of the user's own declare."""
    return [*dict.fromkeys(metric.name for metric in declared(_tasks_of(grid)))]


def _tasks_of(grid: Grid) -> list[Any]:
    return [*dict.fromkeys(run.config.classes["model"] for run in grid.runs)]


def kind_of(grid: Grid, metric: str) -> Metric:
    """Return what the grid's tasks, or others, declare of a metric."""
    return metric_of(metric, _tasks_of(grid))


def against_of(grid: Grid) -> dict[str, str]:
    """Return the settings, or metrics with * in place of a number, that a grid's tables are drawn against, by words."""
    settings = {name for run in grid.of_all_scales for name in run.settings}
    asked = [name for name in grid.file.against.values() if "*" not in name]
    _require(f"setting in against of {grid.name}:", asked, sorted(settings))
    return grid.file.against


def _table(grid: Grid, entry: TableEntry) -> Table:
    columns, runs = entry.columns or grid.file.columns, grid.of_all_scales
    found = columns_of(grid, columns)
    attentions, names = [run.attention for run in runs], [*found] if columns else [run.task for run in runs]
    for what, given, known in (
        ("metric in tables", [entry.metric], [f"{stage}/{m}" for stage in ("test", "val") for m in _metrics_of(grid)]),
        ("attention in published", entry.published, attentions),
        ("attention in pairs", chain.from_iterable(entry.pairs), attentions),
        ("column in published", chain.from_iterable(entry.published.values()), names),
        ("column in relabelled", [*entry.relabelled, *entry.relabelled.values()], names),
        ("column in solved", entry.solved, names),
        ("column in pools", chain.from_iterable(entry.pools.values()), names),
    ):
        _require(f"{what} of {grid.name}:", given, known)
    kind = kind_of(grid, entry.metric)
    published = {
        attention: {column: value if isinstance(value, tuple) else (value, nan) for column, value in cells.items()}
        for attention, cells in entry.published.items()
    }
    of_columns = {name: of for name, of in found.items() if of or any(name in cells for cells in published.values())}
    pools = {pool: frozenset(chain(*(found.get(name, ()) for name in of))) for pool, of in entry.pools.items()}
    return Table(
        metric=f"{entry.metric} over training" if entry.over_training else entry.metric,
        kind=replace(kind, better=entry.better) if entry.better else kind,
        columns=of_columns,
        published=published,
        relabelled=entry.relabelled,
        note=" ".join(entry.note.split()),
        chance=_chance(grid) if entry.metric.endswith("/acc") else {},
        margin=entry.margin,
        solved=entry.solved,
        pools={pool: names for pool, names in pools.items() if names and names not in of_columns.values()},
        pairs=entry.pairs,
        over_training=entry.metric if entry.over_training else "",
    )


def _chance(grid: Grid) -> dict[str, float]:
    chances = {run.name: run.config.classes["data"].chance(**run.config.data["init_args"]) for run in grid.runs}
    return {name: chance for name, chance in chances.items() if chance is not None}


def with_means(results: pd.DataFrame, histories: pd.DataFrame, tables: Sequence[Table]) -> pd.DataFrame:
    """Add a column for each table that is over training: the mean of its metric over the validations of a run."""
    of_runs = {t.metric: t.over_training for t in tables if t.over_training in histories}
    means = {name: histories.groupby("name")[metric].mean() for name, metric in of_runs.items()}
    return results.assign(**{name: results.name.map(values) for name, values in means.items()})


def finished(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """Return the finished runs of a column in which the table's metric is a finite number."""
    return _known(table.runs(results, column), table)


def _known(results: pd.DataFrame, table: Table) -> pd.DataFrame:
    return finite(results[results.state == State.FINISHED], table.metric)


def finite(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of a table in which a metric is a finite number, with the metric as float."""
    rows = table.assign(**{metric: table[metric].astype(float) if metric in table else nan})
    return rows[np.isfinite(rows[metric])]


def cells_of(results: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return all numbers of our results and of the published ones, a row for each cell of the table.

    An attention without a run has rows only if it has published numbers, or if there are no runs at all.
    """
    rows, parts = [], {column: table.runs(results, column) for column in table.columns}
    hidden = {*untried(results)} - {*table.published}
    for column, attention in product(table.columns, [a for a in results.attention.unique() if a not in hidden]):
        ours = parts[column][parts[column].attention == attention]
        known = _known(ours, table)
        summary = summarise(known[table.metric], known.task + " " + known.setting)
        row = {"metric": table.metric, "column": column, "attention": attention, **summary._asdict()}
        seeds = (known.task + " " + known.setting).value_counts()
        row |= {"wanted": len(ours), "wanted_settings": (ours.task + " " + ours.setting).nunique()}
        row |= {"fewest_seeds": seeds.min(), "most_seeds": seeds.max()}
        row |= {"diverged": int((ours.state == State.DIVERGED).sum())}
        if lost := int((ours.state == State.FINISHED).sum()) - len(known):
            row["not_finite"] = lost
        if theirs := table.published_right.get(attention, {}).get(column):
            row |= dict(zip(("published_mean", "published_over_settings"), theirs, strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def untried(results: pd.DataFrame) -> list[str]:
    """Return the attentions none of whose runs has begun; no attention if no run at all has begun."""
    tried = {*results.attention[results.state != State.NEW]}
    return [name for name in results.attention.unique() if tried and name not in tried]


class Compared(NamedTuple):
    """One comparison of two attentions in a column or pool; what is not known of it is NaN."""

    table: int
    column: str
    attention: str
    baseline: str
    left_out: int  # settings that are at the ceiling or at chance
    pairs: int = 0
    settings: int = 0
    seeds: int = 0
    difference: float = nan  # in the metric's units, or of its logarithm, or of shares of solved runs
    low: float = nan
    high: float = nan
    beyond_low: float = nan
    beyond_high: float = nan
    p_different: float = nan
    p_equal: float = nan
    solved: float = nan  # runs
    solved_by_baseline: float = nan
    untested: str = ""

    @property
    def smallest_margin(self) -> float:
        """The margin within which the interval just lies."""
        return max(abs(self.low), abs(self.high))


def comparisons(results: pd.DataFrame, tables: Sequence[Table]) -> pd.DataFrame:
    """Compare attentions, column by column and pool by pool of all tables of a report, which are one family of tests.

    Return a row for each `Compared`, with `smallest_margin` and the `verdict`. Both p are corrected for all rows
    (Holm), the intervals are not. Settings in which every run of every attention is at the ceiling or at chance are
    left out: they show that a task is too easy or too hard, and nothing of a difference.
    """
    rows = [row for number, table in enumerate(tables) for row in _compared(results, number, table)]
    found = pd.DataFrame(rows, columns=Compared._fields).assign(smallest_margin=[row.smallest_margin for row in rows])
    found = found.assign(p_different=holm(found.p_different), p_equal=holm(found.p_equal))
    words = [
        row.untested or verdict(row.difference, row.p_different, row.p_equal, tables[row.table].kind.better)
        for row in found.itertuples()
    ]
    return found.assign(verdict=words)


def _compared(results: pd.DataFrame, number: int, table: Table) -> Iterator[Compared]:
    attentions = results.attention.unique()
    against = [*((attention, attentions[0]) for attention in attentions[1:]), *table.pairs]
    for column in (*table.columns, *table.pools):
        runs = table.runs(results, column)
        lost = Counter(runs.attention[runs.state == State.DIVERGED])
        wide, telling = by_seed(results, table, column)
        for attention, baseline in against:
            pair = [attention, baseline]
            if {*pair} <= set(wide) and len(every := wide[pair].dropna()):
                both = telling[pair].dropna()
                line = Compared(number, column, attention, baseline, _settings(every) - _settings(both))
                shown = both if len(both) else every
                untested = _untested(shown, table.chance_in(column), table) or SILENT * (not len(both))
                if lost[attention] > lost[baseline]:
                    untested = "diverges"  # the pairs that are left are not a random sample
                yield _measured(line._replace(untested=untested), shown, table)


def by_seed(results: pd.DataFrame, table: Table, column: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the metric of a column or pool, a row for each setting and seed, a column for each attention.

    First of all finished runs, then without settings in which every run of every attention is at the ceiling, or every
    one at chance. A setting's text begins with its task.
    """
    known = _known(table.runs(results, column), table)
    known = known.assign(setting=known.task + " " + known.setting, chance=known.name.map(table.chance).astype(float))
    values, chance = known.groupby("setting")[table.metric], known.groupby("setting").chance.min()
    easy, hard = values.min() > table.kind.highest - table.reach, values.max() < chance + table.reach
    wide = known.pivot(index=["setting", "seed"], columns="attention", values=table.metric)
    return wide, wide[~wide.index.isin(chance.index[easy | hard], level="setting")]


def _settings(both: pd.DataFrame) -> int:
    return len(both.index.unique("setting"))


def _untested(both: pd.DataFrame, chance: float | None, table: Table) -> str:
    if both.min(axis=None) > table.kind.highest - table.reach:
        return CEILING  # the task is too easy to tell them apart
    at_chance = chance is not None and both.max(axis=None) < chance + table.reach
    return CHANCE if at_chance else ""  # neither has learned anything


def _measured(line: Compared, both: pd.DataFrame, table: Table) -> Compared:
    """Return a line with its numbers, those of a test if it is not `untested`."""
    ours, theirs = (table.kind.scaled(both[name]) for name in (line.attention, line.baseline))
    setting, seed = (both.index.get_level_values(name).to_series() for name in ("setting", "seed"))
    numbers = compare(ours, theirs, setting, seed)
    line = line._replace(pairs=numbers.pairs, settings=numbers.settings, seeds=numbers.seeds)
    if line.column in table.solved:
        shares = compare_shares(*(values >= NEARLY * table.kind.highest for values in (ours, theirs)))
        difference = (shares.solved - shares.solved_by_baseline) / shares.pairs
        line = line._replace(difference=difference, solved=shares.solved, solved_by_baseline=shares.solved_by_baseline)
        return line if line.untested else line._replace(p_different=shares.different, p_equal=1.0)
    line = line._replace(difference=numbers.difference)
    if line.untested:
        return line
    (low, high), beyond = numbers.interval, numbers.interval_beyond
    line = line._replace(low=low, high=high, beyond_low=beyond[0], beyond_high=beyond[1])
    return line._replace(p_different=numbers.different, p_equal=numbers.equal(table.reach))


def verdict_in_words(compared: Any, kind: Metric) -> str:
    """Return the verdict of a row of `comparisons`, and with "undecided" the smallest margin, in points."""
    margin = compared.smallest_margin if compared.verdict == "undecided" else nan
    return compared.verdict + (f", ± {margin / kind.point:.2f}" if isfinite(margin) else "")


def pair_of(compared: Any) -> str:
    return f"{label(compared.attention)} − {label(compared.baseline)}"


def counts_of(compared: Any) -> str:
    """Return the counts behind a row of `comparisons`: "24 pairs of 8 settings and 3 seeds, 2 settings left out"."""
    counts = ((compared.pairs, "pair"), (compared.settings, "setting"), (compared.seeds, "seed"))
    pairs, settings, seeds = (f"{number} {noun}{'s' * (number > 1)}" for number, noun in counts)
    left_out = f", {compared.left_out} setting{'s' * (compared.left_out > 1)} left out" * (compared.left_out > 0)
    return f"{pairs} of {settings} and {seeds}{left_out}"


def difference_of(compared: Any, kind: Metric) -> str:
    """Return the difference of a row of `comparisons` with its interval, in points, or the counts of solved runs."""
    if isfinite(compared.solved):
        return f"solved {compared.solved:.0f} against {compared.solved_by_baseline:.0f} of {compared.pairs}"
    return kind.points(compared.difference) + interval_of(compared.low, compared.high, kind, " ")


def interval_of(low: float, high: float, kind: Metric, before: str = "") -> str:
    return f"{before}[{kind.points(low)}, {kind.points(high)}]" if isfinite(low) else "–" * (not before)


def results_table(cells: pd.DataFrame, table: Table, relabelled: bool = False) -> Markdown:
    """Return our results, the published ones and the difference, with the columns as printed or relabelled."""
    kind, all_published = table.kind, table.published_right if relabelled else table.published
    lines = [["", *table.columns, "mean"]]
    for attention, ours in cells.groupby("attention", sort=False):
        texts = [_cell(kind, cell) for cell in ours.itertuples()]
        # a mean without all of its columns would be another one: hence skipna=False
        lines.append([bold_label(attention), *texts, kind.value(ours["mean"].mean(skipna=False))])
        if theirs := all_published.get(attention, {}):
            published = [theirs.get(column, (nan, nan)) for column in table.columns]
            means = pd.Series([mean for mean, _ in published], ours.index)
            texts = [_published(kind, *value) for value in published]
            lines.append(["published", *texts, kind.value(means.mean(skipna=False))])
            differences = kind.scaled(ours["mean"]) - kind.scaled(means)
            lines.append(["difference", *map(kind.points, [*differences, differences.mean(skipna=False)])])
    return markdown_table(lines)


def comparisons_table(compared: pd.DataFrame, kind: Metric) -> Markdown:
    """Return a table with a row for each comparison, without the columns of the tests if none is tested."""
    lines = [["", "pair", "n", "difference", "beyond this grid", "p (no difference)", "p (TOST)", "verdict"]]
    for one in compared.itertuples():
        beyond = interval_of(one.beyond_low, one.beyond_high, kind)
        tests = [beyond, _p(one.p_different), _p(one.p_equal)]
        about = [one.column, pair_of(one), counts_of(one), difference_of(one, kind)]
        lines.append([*about, *tests, verdict_in_words(one, kind)])
    untested = compared.p_different.isna().all()
    return markdown_table([[*line[:4], line[-1]] for line in lines] if untested else lines)


def at_the_ceiling(compared: pd.DataFrame) -> str:
    """List the comparisons at the ceiling by column: "copy; reverse (all but KV+Pos); sort (KV)"."""
    words = []
    with_first = compared[compared.baseline == compared.baseline.iloc[0]]
    for column, here in with_first.groupby("column", sort=False):
        is_easy = here.verdict == CEILING
        easy, hard = ([label(attention) for attention in here.attention[chosen]] for chosen in (is_easy, ~is_easy))
        if easy:
            fewer = f" (all but {' / '.join(hard)})" if len(hard) < len(easy) else f" ({' / '.join(easy)})"
            words.append(column + fewer * bool(hard))
    return "; ".join(words)


def shares_table(cells: pd.DataFrame, table: Table) -> Markdown | None:
    """Return a table of the shares of variance that are due to settings; None if none is known."""
    shares = cells.pivot(index="attention", columns="column", values="share_of_settings")
    shares = shares.reindex(index=cells.attention.unique(), columns=[*table.columns]).dropna(how="all")
    return attentions_table(shares, lambda share: f"{100 * share:.0f} %") if len(shares) else None


def steps_table(histories: pd.DataFrame, table: Table, columns: Sequence[str]) -> Markdown | None:
    """Return a table of the steps to `NEARLY` the highest value in validation, medians over runs; None if unknown."""
    metric = f"val/{table.metric.partition('/')[2]}"
    if metric not in histories:
        return None
    runs = histories.dropna(subset=metric).drop_duplicates("name")
    runs = runs.assign(steps=runs.name.map(steps_to_ceiling(histories, metric)).fillna(inf))
    medians = {c: runs[runs.name.isin(table.columns[c])].groupby("attention").steps.median() for c in columns}
    return attentions_table(pd.DataFrame(medians, index=runs.attention.unique()), "{:,.0f}".format)


def steps_to_ceiling(histories: pd.DataFrame, metric: str) -> "pd.Series[float]":
    """Return the first step with `NEARLY` the highest value of a metric, by the name of each run that gets there."""
    return histories[histories[metric] >= NEARLY * metric_of(metric).highest].groupby("name").step.min()


def attentions_table(numbers: pd.DataFrame, form: Callable[[float], str]) -> Markdown:
    """Return a table of numbers, a row for each attention; a dash where there is none."""
    lines = [[bold_label(name), *(form(x) if isfinite(x) else "–" for x in row)] for name, *row in numbers.itertuples()]
    return markdown_table([["", *numbers.columns], *lines])


def bold_label(attention: str) -> Markdown:
    return Markdown("**{}**").format(label(attention))


def _cell(kind: Metric, cell: Any) -> str:
    if not cell.wanted:
        return "not in this scale"
    lost = getattr(cell, "not_finite", 0)  # a column only of tables that need it
    gone = f", {cell.diverged} diverged" * (cell.diverged > 0)
    gone += f", {lost:g} without a finite number" * (lost > 0)
    if not cell.runs:
        return f"{'no value' if lost > 0 else 'not run'} (0 of {cell.wanted}{gone})"
    spread = f" ± {kind.value(cell.over_settings)}" * isfinite(cell.over_settings)
    count = str(cell.runs) if cell.runs == cell.wanted else f"{cell.runs} of {cell.wanted}{gone}{_share(cell)}"
    return f"{kind.value(cell.mean)}{spread}, n = {count}"


def _share(cell: Any) -> str:
    """Return how many settings of a cell have runs, and with how many seeds."""
    seeds = (
        f"{cell.fewest_seeds:.0f}"
        if cell.fewest_seeds == cell.most_seeds
        else f"{cell.fewest_seeds:.0f} to {cell.most_seeds:.0f}"
    )
    of = f"; {cell.settings} of {cell.wanted_settings} settings" * (cell.wanted_settings > 1)
    return f"{of}, {seeds} seed{'s' * (cell.most_seeds > 1)}"


def _p(value: float) -> str:
    return "–" if isnan(value) else f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _published(kind: Metric, mean: float, std: float) -> str:
    return kind.value(mean) + (f" ± {kind.value(std)}" if isfinite(std) else "")


def _same(ours: Any, wanted: Any) -> bool:
    try:
        return float(ours) == float(wanted)  # YAML reads 1e-3 as a text
    except (TypeError, ValueError):
        return bool(ours == wanted)
