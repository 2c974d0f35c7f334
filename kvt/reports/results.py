"""Computes the results of a grid once for a whole report, so that all sections use the same comparisons."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from kvt.markdown import Markdown
from kvt.reports.best_of import best_of
from kvt.reports.comparisons import Compared, comparisons, with_means
from kvt.reports.tables import Table, tables_of
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes, State, table_of_histories, table_of_repeats, table_of_results


class Results(NamedTuple):
    """The results of a grid. Of each sweep over `best_of`, only the best run is included.

    Attributes:
        runs: a row for each run, with its settings, `state` and metrics (see `table_of_results`).
        repeats: a row for each repetition of a run.
        histories: a row for each step that a finished run logged (see `table_of_histories`).
        tables: the tables that the grid names.
        compared: the `comparisons` of all tables.
        swept: a sentence about the sweeps; None for a grid without `best_of`.
        root: the folder of the runs; None if the results come from records.
    """

    runs: pd.DataFrame
    repeats: pd.DataFrame
    histories: pd.DataFrame
    tables: Sequence[Table]
    compared: Sequence[Compared]
    swept: Markdown | None = None
    root: Path | None = None

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs.state == State.FINISHED]

    @property
    def first(self) -> str:
        """The first attention of the grid. Reports compare all other attentions with it."""
        return str(self.runs.attention.iloc[0])

    def compared_in(self, number: int) -> list[Compared]:
        """Return the comparisons of the table with this index."""
        return [one for one in self.compared if one.table == number]


def measure(grid: Grid, outcomes: Outcomes, root: Path | None = None) -> tuple[Grid, Results]:
    """Return the grid reduced to the best run of each sweep over `best_of`, and the results of these runs."""
    grid, swept = best_of(grid, outcomes)
    histories, tables = table_of_histories(grid, outcomes), tables_of(grid, outcomes)
    runs = with_means(table_of_results(grid, outcomes), histories, tables)
    repeats, compared = table_of_repeats(grid, outcomes), comparisons(runs, tables)
    return grid, Results(runs, repeats, histories, tables, compared, swept, root)
