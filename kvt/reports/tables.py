"""Reads the tables of a grid, and names metrics in words."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import nan
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from kvt.attention import ATTENTION
from kvt.study.grid import Columns, Grid, TableEntry, select
from kvt.study.outcomes import Outcomes, State, outcome_of
from kvt.system import unknown
from kvt.tasks import Task
from kvt.tasks.base import known_classes
from kvt.tasks.metrics import ACC, Metric

STAGES = {"train": "training", "val": "validation", "test": "test"}
Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""Maps attention to column to (published mean, standard deviation over settings). The deviation may be NaN."""


def label(attention: str) -> str:
    """Return an attention's label in reports: kvt's label, or the name of another class, followed by arguments.

    >>> label("kv+pos"), label("q-kv, kv_heads 1"), label("my_attention.NearKV, slope 0.5")
    ('KV+Pos', 'Q≠K=V, kv_heads 1', 'NearKV, slope 0.5')
    >>> label("kv+phase, attend_self False, phase 0.5")
    'KV+Phase without self, phase 0.5'
    """
    name, comma, details = attention.partition(",")
    own = ATTENTION[name].label if name in ATTENTION else name.rpartition(".")[2]
    return own + (comma + details).replace(", attend_self False", " without self")


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as "1 seed" or "3 seeds"."""
    return f"{number:.0f} {noun}{'s' * (number != 1)}"


def declared(tasks: Iterable[type[Task]] = ()) -> list[Metric]:
    """Return the metrics of the classes `tasks`, followed by the metrics of kvt's tasks."""
    ours = (cls for cls in known_classes().values() if issubclass(cls, Task))
    return [*dict.fromkeys(chain.from_iterable(task.metrics for task in (*tasks, *ours)))]


def metric_of(name: str, tasks: Iterable[type[Task]] = ()) -> Metric:
    """Return the `Metric` of "val/NAME" that `tasks`, or else kvt's tasks, declare; `Metric(NAME)` if none do.

    >>> metric_of("val/loss").words, metric_of("val/loss").better, metric_of("test/acc_4_back").label
    ('loss (nats)', 'less', 'accuracy 4 places back')
    >>> metric_of("test/odd_ones").label, metric_of("test/odd_ones").better
    ('odd ones', None)
    """
    bare = name.rpartition("/")[2]
    return next((found for metric in declared(tasks) if (found := metric.called(bare))), Metric(bare))


def in_words(name: str, kind: Metric | None = None) -> str:
    """Return the split, the label and the unit of a metric in words, such as "validation loss (nats)"."""
    return f"{STAGES[name.partition('/')[0]]} {(kind or metric_of(name)).words}"


class Table(NamedTuple):
    metric: str  # such as "test/acc", or "val/acc over training"
    kind: Metric
    columns: Mapping[str, frozenset[str]]  # the names of the runs of each column
    published: Published = MappingProxyType({})
    printed: Published = MappingProxyType({})  # published numbers in the columns that the paper prints, if any is wrong
    note: str = ""
    chance: Mapping[str, float] = MappingProxyType({})  # maps a run's name to the accuracy of guessing, if known
    accuracy: str = ""  # name of the accuracy that is compared with `chance`; "" if it is `metric`
    margin: float = 1.0  # in points; a difference counts as equal if its 90 % interval is within ± `margin`
    # the claimed comparisons, (column, attention, baseline), with their margins; None: all, with the table's margin
    claims: Mapping[tuple[str, str, str], float] | None = None
    solved: Collection[str] = ()  # columns in which the numbers of runs that solved the task are compared
    pools: Mapping[str, frozenset[str]] = MappingProxyType({})  # maps a pool (a group of columns) to its runs' names
    pairs: Sequence[tuple[str, str]] = ()  # pairs to compare, besides each attention with the first
    over_training: str = ""  # if not empty, `metric` is the mean of this metric over all validations

    @property
    def title(self) -> str:
        mean = ", mean over training" * bool(self.over_training)
        return in_words(self.over_training or self.metric, self.kind) + mean

    @property
    def point_of_chance(self) -> float:
        """The size of a point of the accuracy that is compared with `chance`."""
        return ACC.point if self.accuracy else self.kind.point

    def chance_in(self, column: str) -> float | None:
        """Return a column's or pool's lowest accuracy of guessing; None without runs, or if one accuracy is unknown."""
        names = self.names(column)
        return min(self.chance[name] for name in names) if names and names <= self.chance.keys() else None

    def margin_of(self, column: str, attention: str, baseline: str) -> float:
        """Return the margin of a comparison in points; NaN if `claims` is not None and lacks the comparison."""
        return self.margin if self.claims is None else self.claims.get((column, attention, baseline), nan)

    def names(self, column: str) -> frozenset[str]:
        """Return the names of the runs of a column or pool; no names if there is no such column or pool."""
        return self.columns[column] if column in self.columns else self.pools.get(column, frozenset())

    def runs(self, results: pd.DataFrame, column: str) -> pd.DataFrame:
        """Return the rows of `results` that belong to a column or pool."""
        return results[results.name.isin(self.names(column))]


def columns_of(grid: Grid, columns: Columns) -> dict[str, frozenset[str]]:
    """Return the names of runs at the grid's scale by column; raise UserError if a column has no run at any scale."""
    if columns is None or isinstance(columns, list):
        columns = {task: {"task": task} for task in columns or [run.task for run in grid.runs]}
    found, names = {}, {run.name for run in grid.runs}
    for column, wanted in columns.items():
        runs = select(grid.of_all_scales, wanted, f"columns of {grid.name}, {column}")
        found[column] = frozenset(run.name for run in runs) & names
    return found


def tables_of(grid: Grid, outcomes: Outcomes = MappingProxyType({})) -> list[Table]:
    """Return the tables of a grid, without columns that have neither runs nor published numbers.

    A grid without `tables` gets a table of the test metric for each `monitor` of its tasks, and a table of the
    validation metric for tasks without a test split. Raises UserError if an entry of the grid names an unknown metric,
    column, setting, attention or scale.
    """
    columns_of(grid, grid.file.columns)  # checks the columns: learning curves use them even if no table does
    entries = grid.file.tables
    found = _usual(grid, outcomes) if entries is None else (_table(grid, outcomes, entry) for entry in entries)
    return [table for table in found if table.columns]


def _usual(grid: Grid, outcomes: Outcomes) -> Iterator[Table]:
    for monitor in dict.fromkeys(task.monitor for task in tasks_of(grid)):
        runs = [run for run in grid.runs if run.config.classes["model"].monitor == monitor]
        of_test = f"test/{monitor.partition('/')[2]}"
        done = [(run.task, one.result) for run in runs if (one := outcome_of(run, outcomes)).state == State.FINISHED]
        tested = {task for task, result in done if of_test in result}
        untested = [*dict.fromkeys(task for task, _ in done if task not in tested)]
        note = f"no test split: {', '.join(untested)}; the best checkpoint is evaluated on the split that chose it"
        for metric, words in ((of_test, ""), (monitor, note)):
            names = {run.name for run in runs if (run.task in untested) == (metric == monitor)}
            table = _table(grid, outcomes, TableEntry(metric=metric, note=words))
            yield table._replace(columns={name: of & names for name, of in table.columns.items() if of & names})


def _table(grid: Grid, outcomes: Outcomes, entry: TableEntry) -> Table:
    columns, runs = entry.columns or grid.file.columns, grid.of_all_scales
    found = columns_of(grid, columns)
    attentions, names = [run.attention for run in runs], [*found] if columns else [run.task for run in runs]
    claims = {(one.scale, one.column, *pair): one.margin for one in entry.claims or () for pair in one.pairs}
    for what, given, known in (
        ("metric in tables", [entry.metric], _metrics_of(grid, "test", "val")),
        ("attention in published", entry.published, attentions),
        ("attention in pairs", chain.from_iterable(grid.file.pairs), attentions),
        ("scale in claims", [scale for scale, *_ in claims], grid.file.scales),
        ("column in claims", [column for _, column, *_ in claims], [*names, *entry.pools]),
        ("attention in claims", chain.from_iterable(pair for _, _, *pair in claims), attentions),
        ("column in published", chain.from_iterable(entry.published.values()), names),
        ("column in relabelled", [*entry.relabelled, *entry.relabelled.values()], names),
        ("column in solved", entry.solved, names),
        ("column in pools", chain.from_iterable(entry.pools.values()), names),
    ):
        _require(f"{what} of {grid.name}:", given, known)
    printed = entry.published_pairs
    published = {
        attention: {entry.relabelled.get(column, column): value for column, value in cells.items()}
        for attention, cells in printed.items()
    }
    of_columns = {name: of for name, of in found.items() if of or any(name in cells for cells in published.values())}
    pools = {pool: frozenset(chain(*(found.get(name, ()) for name in of))) for pool, of in entry.pools.items()}
    split = entry.metric.partition("/")[0]
    return Table(
        metric=f"{entry.metric} over training" if entry.over_training else entry.metric,
        kind=metric_of(entry.metric, tasks_of(grid)),
        columns=of_columns,
        published=published,
        printed=printed if entry.relabelled else {},
        note=" ".join(entry.note.split()),
        chance=_chance(grid, outcomes, split),
        accuracy="" if entry.metric.endswith("/acc") else f"{split}/acc",
        margin=entry.margin,
        claims=None if entry.claims is None else {key[1:]: of for key, of in claims.items() if key[0] == grid.scale},
        solved=entry.solved,
        pools={pool: names for pool, names in pools.items() if names and names not in of_columns.values()},
        pairs=grid.file.pairs,
        over_training=entry.metric if entry.over_training else "",
    )


def _chance(grid: Grid, outcomes: Outcomes, split: str) -> dict[str, float]:
    """Return known accuracies of guessing by run: the recorded share of the largest class, or the data's `chance`."""
    chances = {}
    for run in grid.runs:
        shares = outcome_of(run, outcomes).result.get("largest_class") or {}
        chances[run.name] = shares.get(split) or run.config.classes["data"].chance(**run.config.data["init_args"])
    return {name: chance for name, chance in chances.items() if chance is not None}


def curves_of(grid: Grid) -> list[list[str]]:
    """Return a grid's `curves`: for each figure its metrics, the main one first; UserError if a metric is unknown."""
    known = _metrics_of(grid, "val", "train")
    _require(f"metric in curves of {grid.name}:", chain.from_iterable(grid.file.curves), known)
    return grid.file.curves


def against_of(grid: Grid) -> dict[str, str]:
    """Return what figures plot metrics against, {axis label: setting, or pattern of metrics like test/acc_*_back}.

    Raises UserError for an unknown setting.
    """
    settings = {name for run in grid.of_all_scales for name in run.settings}
    asked = [name for name in grid.file.against.values() if "*" not in name]
    _require(f"setting in against of {grid.name}:", asked, sorted(settings))
    return grid.file.against


def tasks_of(grid: Grid) -> list[type[Task]]:
    """Return the classes of the grid's tasks."""
    return [*dict.fromkeys(run.config.classes["model"] for run in grid.runs)]


def _metrics_of(grid: Grid, *splits: str) -> list[str]:
    return [f"{split}/{metric.name}" for split in splits for metric in declared(tasks_of(grid))]


def _require(what: str, names: Iterable[str], known: Collection[str]) -> None:
    if strange := [name for name in names if name not in known]:
        raise unknown(what, strange[0], dict.fromkeys(known))
