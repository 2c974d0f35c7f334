"""What the runs of a grid show, computed once for all pages: a report and another page quote the same comparisons."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from kvt.reports.best_of import best_of
from kvt.reports.tables import Table, comparisons, tables_of, with_means
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes, table_of_histories, table_of_results
from kvt.system.quoting import Markdown


class Measured(NamedTuple):
    grid: Grid  # with the best run alone of each sweep
    swept: Markdown | None  # a sentence about the sweeps, if there are any
    results: pd.DataFrame  # a row for each run
    histories: pd.DataFrame
    tables: Sequence[Table]
    compared: pd.DataFrame  # the `comparisons` of all tables


def measure(grid: Grid, outcomes: Outcomes) -> Measured:
    """Return results, tables and comparisons of a grid, given the outcomes of its runs."""
    grid, swept = best_of(grid, outcomes)
    histories, tables = table_of_histories(grid, outcomes), tables_of(grid)
    results = with_means(table_of_results(grid, outcomes), histories, tables)
    return Measured(grid, swept, results, histories, tables, comparisons(results, tables))
