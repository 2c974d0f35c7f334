"""Write the tables, comparisons and bars of these reports again, from the runs in their results.csv.

    python docs/results/remake.py

Curves, training times, machine and versions are not in results.csv, and stay as they are.
"""

from pathlib import Path

import pandas as pd

from kvt.reports.figures import as_svg
from kvt.reports.report import draw_bars, text_of_tables
from kvt.reports.tables import tables_of
from kvt.study.grid import Grid, read_grid, varying_settings

HERE = Path(__file__).parent
MARGIN = 1.0
"""The default of `kvt study report`."""


def read_results(grid: Grid, path: Path) -> pd.DataFrame:
    """Return the table of `table_of_results`, without the columns that results.csv does not have."""
    setting = {run.name: run.text(varying_settings(grid.runs)) for run in grid.runs}
    results = pd.read_csv(path, keep_default_na=False, na_values={"test/acc": [""]})
    if list(results.name) != list(setting):
        raise ValueError(f"{path} does not hold the runs of {grid.name} at scale {grid.scale}")
    return results.assign(setting=results.name.map(setting))


def remake(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the text of report.md and the pictures by file name."""
    name, _, scale = folder.name.rpartition("-")
    grid = read_grid(name, scale)
    results = read_results(grid, folder / "results.csv")
    tables = tables_of(grid)
    before, _, rest = (folder / "report.md").read_text(encoding="utf-8").partition("\n## ")
    after = rest[rest.index("\n## Curves and bars") :]
    text = "\n\n".join([before.rstrip("\n"), *text_of_tables(grid, results, MARGIN)])
    pictures = {f"bars-{table.metric.replace('/', '-')}.svg": as_svg(draw_bars(results, table)) for table in tables}
    return f"{text}\n{after}", pictures


if __name__ == "__main__":
    for report in sorted(HERE.glob("*/report.md")):
        text, pictures = remake(report.parent)
        report.write_text(text, encoding="utf-8")
        for name, svg in pictures.items():
            (report.parent / name).write_text(svg, encoding="utf-8")
