"""Reads the tables of a grid: metric, columns, published numbers and compared attentions."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import nan
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from kvt.reports.names import declared, in_words, metric_of
from kvt.study.grid import Columns, Grid, TableEntry, select
from kvt.study.outcomes import Outcomes, State, outcome_of
from kvt.system import unknown
from kvt.tasks.metrics import ACC, Metric

Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""A mapping from attention and column to mean and standard deviation over settings. The latter may be NaN."""


class Table(NamedTuple):
    metric: str  # such as "test/acc"
    kind: Metric
    columns: Mapping[str, frozenset[str]]  # the names of the runs of each column
    published: Published = MappingProxyType({})
    relabelled: Mapping[str, str] = MappingProxyType({})  # the correct names of columns that the paper mislabels
    note: str = ""
    chance: Mapping[str, float] = MappingProxyType({})  # maps a run's name to the accuracy of guessing, if known
    accuracy: str = ""  # the accuracy to compare with `chance`, if `metric` is not an accuracy
    margin: float = 1.0  # in points; a difference below the margin counts as equal
    claims: Mapping[tuple[str, str, str], float] | None = None  # column, attention, baseline: margin; None: all
    solved: Collection[str] = ()  # columns in which the numbers of runs that solved the task are compared
    pools: Mapping[str, frozenset[str]] = MappingProxyType({})  # maps a group of columns to their runs
    pairs: Sequence[tuple[str, str]] = ()  # pairs to compare, besides each attention with the first
    over_training: str = ""  # if not empty, `metric` is the mean of this metric over all validations

    @property
    def title(self) -> str:
        mean = ", mean over training" * bool(self.over_training)
        return in_words(self.over_training or self.metric, self.kind) + mean

    def margin_of(self, column: str, attention: str, baseline: str) -> float:
        """Return the margin of a comparison in points; NaN if no claim is about the comparison."""
        return self.margin if self.claims is None else self.claims.get((column, attention, baseline), nan)

    @property
    def point_of_chance(self) -> float:
        """A point of the accuracy, or of the metric if there is no accuracy, for comparisons with `chance`."""
        return ACC.point if self.accuracy else self.kind.point

    def chance_in(self, column: str) -> float | None:
        """Return the lowest accuracy of guessing in a column or pool; None if it is unknown for any run."""
        names = self.names(column)
        return min(self.chance[name] for name in names) if names and names <= self.chance.keys() else None

    def names(self, column: str) -> frozenset[str]:
        """Return the names of the runs of a column or pool."""
        return self.columns[column] if column in self.columns else self.pools.get(column, frozenset())

    def runs(self, results: pd.DataFrame, column: str) -> pd.DataFrame:
        """Return the rows of `results` that belong to a column or pool."""
        return results[results.name.isin(self.names(column))]

    @property
    def published_right(self) -> Published:
        return {
            attention: {self.relabelled.get(column, column): value for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


def columns_of(grid: Grid, columns: Columns) -> dict[str, frozenset[str]]:
    """Map each column to the names of its runs; raise UserError if a column has no runs at any scale of the grid."""
    if columns is None or isinstance(columns, list):
        columns = {task: {"task": task} for task in columns or [run.task for run in grid.runs]}
    found, names = {}, {run.name for run in grid.runs}
    for column, wanted in columns.items():
        runs = select(grid.of_all_scales, wanted, f"columns of {grid.name}, {column}")
        found[column] = frozenset(run.name for run in runs) & names
    return found


def tables_of(grid: Grid, outcomes: Outcomes = MappingProxyType({})) -> list[Table]:
    """Return the tables of a grid, without columns that have neither runs nor published numbers.

    A grid without `tables` gets a table for each metric that is the `monitor` of a task. The table has the test metric,
    or the validation metric of tasks without a test split.
    """
    columns_of(grid, grid.file.columns)  # checks the columns: learning curves use them even if no table does
    entries = grid.file.tables
    found = _usual(grid, outcomes) if entries is None else (_table(grid, outcomes, entry) for entry in entries)
    return [table for table in found if table.columns]


def _usual(grid: Grid, outcomes: Outcomes) -> Iterator[Table]:
    """Yield for each `monitor` a table of the test metric, or of the validation metric for tasks without test split."""
    metrics: dict[str, set[str]] = {}
    for run in grid.runs:
        metrics.setdefault(run.config.classes["model"].monitor, set()).add(run.task)
    for monitor, tasks in metrics.items():
        of_test = f"test/{monitor.partition('/')[2]}"
        measured: dict[str, set[str]] = {}
        for run in grid.runs:
            if run.task in tasks and (outcome := outcome_of(run, outcomes)).state == State.FINISHED:
                measured.setdefault(run.task, set()).update(outcome.result)
        untested = [task for task, names in measured.items() if of_test not in names]
        note = f"no test split: {', '.join(untested)}; the best checkpoint is evaluated on the split that chose it"
        for metric, chosen, words in ((of_test, tasks.difference(untested), ""), (monitor, {*untested}, note)):
            table = _table(grid, outcomes, TableEntry(metric=metric, note=words))
            names = {run.name for run in grid.runs if run.task in chosen}
            yield table._replace(columns={name: of & names for name, of in table.columns.items() if of & names})


def curves_of(grid: Grid) -> list[list[str]]:
    """Return the `curves` of a grid: for each figure of learning curves a list of metrics, the main metric first."""
    known = [f"{stage}/{metric}" for stage in ("val", "train") for metric in _metrics_of(grid)]
    _require(f"metric in curves of {grid.name}:", chain.from_iterable(grid.file.curves), known)
    return grid.file.curves


def _require(what: str, names: Iterable[str], known: Collection[str]) -> None:
    if strange := [name for name in names if name not in known]:
        raise unknown(what, strange[0], dict.fromkeys(known))


def _metrics_of(grid: Grid) -> list[str]:
    """Return the names of kvt's metrics and of the metrics that the grid's tasks declare."""
    return [*dict.fromkeys(metric.name for metric in declared(_tasks_of(grid)))]


def _tasks_of(grid: Grid) -> list[Any]:
    return [*dict.fromkeys(run.config.classes["model"] for run in grid.runs)]


def kind_of(grid: Grid, metric: str) -> Metric:
    """Return the `Metric` with this name that the grid's tasks declare, or else the declaration of kvt's tasks."""
    return metric_of(metric, _tasks_of(grid))


def against_of(grid: Grid) -> dict[str, str]:
    """Return the `against` of a grid: a dict that maps the label of a horizontal axis to the setting on this axis.

    A name such as "test/acc_*_back" stands for all metrics that match it. The matched number is then on the axis.
    """
    settings = {name for run in grid.of_all_scales for name in run.settings}
    asked = [name for name in grid.file.against.values() if "*" not in name]
    _require(f"setting in against of {grid.name}:", asked, sorted(settings))
    return grid.file.against


def _table(grid: Grid, outcomes: Outcomes, entry: TableEntry) -> Table:
    columns, runs = entry.columns or grid.file.columns, grid.of_all_scales
    found = columns_of(grid, columns)
    attentions, names = [run.attention for run in runs], [*found] if columns else [run.task for run in runs]
    claims = {(one.scale, one.column, *pair): one.margin for one in entry.claims or () for pair in one.pairs}
    for what, given, known in (
        ("metric in tables", [entry.metric], [f"{stage}/{m}" for stage in ("test", "val") for m in _metrics_of(grid)]),
        ("attention in published", entry.published, attentions),
        ("attention in pairs", chain.from_iterable(entry.pairs), attentions),
        ("scale in claims", [scale for scale, *_ in claims], grid.file.scales),
        ("column in claims", [column for _, column, *_ in claims], [*names, *entry.pools]),
        ("attention in claims", chain.from_iterable(pair for _, _, *pair in claims), attentions),
        ("column in published", chain.from_iterable(entry.published.values()), names),
        ("column in relabelled", [*entry.relabelled, *entry.relabelled.values()], names),
        ("column in solved", entry.solved, names),
        ("column in pools", chain.from_iterable(entry.pools.values()), names),
    ):
        _require(f"{what} of {grid.name}:", given, known)
    published = entry.published_pairs
    of_columns = {name: of for name, of in found.items() if of or any(name in cells for cells in published.values())}
    pools = {pool: frozenset(chain(*(found.get(name, ()) for name in of))) for pool, of in entry.pools.items()}
    return Table(
        metric=f"{entry.metric} over training" if entry.over_training else entry.metric,
        kind=kind_of(grid, entry.metric),
        columns=of_columns,
        published=published,
        relabelled=entry.relabelled,
        note=" ".join(entry.note.split()),
        chance=_chance(grid, outcomes, entry.metric.partition("/")[0]),
        accuracy="" if entry.metric.endswith("/acc") else f"{entry.metric.partition('/')[0]}/acc",
        margin=entry.margin,
        claims=None if entry.claims is None else {key[1:]: of for key, of in claims.items() if key[0] == grid.scale},
        solved=entry.solved,
        pools={pool: names for pool, names in pools.items() if names and names not in of_columns.values()},
        pairs=entry.pairs,
        over_training=entry.metric if entry.over_training else "",
    )


def _chance(grid: Grid, outcomes: Outcomes, split: str) -> dict[str, float]:
    """Return the accuracy of guessing for each run: the recorded share of the largest class, or the task's `chance`."""
    chances = {}
    for run in grid.runs:
        shares = outcome_of(run, outcomes).result.get("largest_class") or {}
        chances[run.name] = shares.get(split) or run.config.classes["data"].chance(**run.config.data["init_args"])
    return {name: chance for name, chance in chances.items() if chance is not None}
