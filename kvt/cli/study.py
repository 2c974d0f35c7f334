"""`kvt study run`, `kvt study report` and `kvt reproduce`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvt.system.console import quick_imports
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import require_folder, user_path

if TYPE_CHECKING:  # as in kvt/cli/main.py, what takes seconds to import is imported where it is used
    from kvt.study.grid import Grid, Run

FOLDER = "lightning_logs/study"
GRIDS = Path("experiments/grids")
TABLE1 = "table1"
REPORT = ("report.md", "report.html", "results.csv")


def study_run(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    fleet: int | None = None,
    runs: int | None = None,
) -> None:
    """Makes the runs of a grid that are not there yet.

    A run is named by a hash of all its settings. What is finished is left alone, what was killed goes on from its last
    checkpoint, what failed is recorded and left, and so is a damaged run, whose result or history no run has written.
    Stop it as you like: the same command goes on. Several studies, on one machine or many, may share a folder and the
    work.

    Args:
        grids: YAML files, such as experiments/grids/table2.yaml.
        scale: which of the grid's scales, in those of the paper smoke, laptop or paper; default: laptop, or the first
            of a grid that has no laptop.
        folder: where runs land, <task>/<attn>/<name>.
        workers: processes at once, each on its share of the cores or on a GPU; default: one a core, or one a GPU.
        ray: address of a Ray cluster to run on instead, "auto" for the one that this machine belongs to; all its
            machines must see the folder and the data under the same path.
        retry_failed: try again, once, what has failed or is damaged by now. What failed goes on from its last
            checkpoint, of what is damaged nothing stays.
        dry_run: say how the runs of each task stand and how long those to do will take, and make none. Where no run
            like them is finished, a few steps are timed, for a minute at the most; no data are downloaded for it.
        list: print each run and how it stands, and make none.
        fleet: how many runs that differ but in seed, task or learning rate a worker trains as one, at most; default: 16
            on a GPU, where a small model alone leaves most of it idle, else 1.
        runs: how many runs you expect, as --dry_run says; another number is an error.
    """
    chosen = _runs_of(_read(grids, scale))
    if runs is not None and runs != len(chosen):
        raise UserError(f"--runs {runs}: it is {len(chosen)} runs; --list names them")
    _exit(_make(chosen, _root(folder), workers, ray, retry_failed, dry_run, list, fleet))


def study_report(
    *grids: str, scale: str | None = None, folder: str = FOLDER, out: str | None = None, margin: float = 1.0
) -> None:
    """Writes the report of a grid: report.md with its pictures, report.html with them inside, results.csv.

    What is not run yet is shown as not run, what is damaged as damaged.

    Args:
        grids: YAML files, such as experiments/grids/table2.yaml.
        scale: which of the grid's scales; default: as in kvt study run.
        folder: where the runs are.
        out: a folder for the report; default: reports/<grid>-<scale> in the folder of the runs.
        margin: how many points (hundredths of accuracy, BLEU, hundredths of a nat) still count as equal.
    """
    require_positive(margin=margin)
    chosen, root = _read(grids, scale), _root(folder)
    if out is not None and len(chosen) > 1:
        raise UserError("--out takes the report of one grid: name one, or leave --out out")
    _report(chosen, root, _targets(chosen, root, user_path(out) if out else None), margin)


def reproduce(
    *names: str,
    all: bool = False,
    scale: str = "laptop",
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    fleet: int | None = None,
    margin: float = 1.0,
) -> None:
    """Makes tables and figures of the paper anew: their runs, as far as they are not there yet, and their reports.

    Figures 2 and 4 come with tables 2 and 3. Stop it as you like: the same command goes on.

    Args:
        names: of files in experiments/grids: table2, table3, figure3, figure5, figure6, figure7, three-projections; or
            table1, what attention costs.
        all: all of them.
        scale: smoke (minutes, learns nothing), laptop (an evening) or paper (days).
        folder: where runs and reports land.
        workers: as in kvt study run.
        ray: as in kvt study run.
        retry_failed: as in kvt study run.
        dry_run: as in kvt study run.
        list: as in kvt study run.
        fleet: as in kvt study run.
        margin: as in kvt study report.
    """
    require_positive(margin=margin)
    known = {path.stem: path for path in sorted(GRIDS.glob("*.yaml"))}
    if not known:
        raise UserError(f"{GRIDS} is not here: run this in a checkout of kvt")
    chosen = [*known, TABLE1] if all else [*dict.fromkeys(names)]
    if not chosen:
        raise UserError(f"name what to make, or --all: {', '.join([TABLE1, *known])}")
    for name in chosen:
        if name not in (TABLE1, *known):
            raise unknown("table or figure", name, [TABLE1, *known])
    root = _root(folder)
    failed = 0
    grids = _read([str(known[name]) for name in chosen if name in known], scale) if {*chosen} - {TABLE1} else []
    looks = dry_run or list
    targets = [] if looks else _targets(grids, root, None)
    if TABLE1 in chosen and not looks:
        require_folder(root / "reports", "--folder", files=[f"{TABLE1}.{ending}" for ending in ("csv", "md", "png")])
    if grids:
        failed = _make(_runs_of(grids), root, workers, ray, retry_failed, dry_run, list, fleet)
        if not looks:
            _report(grids, root, targets, margin)
    if looks:
        return
    if TABLE1 in chosen:
        with quick_imports():
            from kvt.cli.bench import bench

        (root / "reports").mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = {"n": [16], "d": [64], "repeats": 3} if scale == "smoke" else {}
        bench(**sizes, out=str(root / "reports" / TABLE1), plot=True)
    _exit(failed)


def _root(folder: str) -> Path:
    """The folder of all runs, in full; a link to itself stays what it is."""
    return Path(os.path.realpath(user_path(folder)))


def _read(grids: Sequence[str], scale: str | None) -> list["Grid"]:
    if not grids:
        raise UserError(f"name a grid, such as {GRIDS}/table2.yaml")
    with quick_imports():
        from kvt.reports.tables import tables_of
        from kvt.study.grid import read_grid

    found = [read_grid(user_path(grid), scale) for grid in grids]
    for grid in found:
        tables_of(grid)  # a mistake there is found before the work
    return found


def _make(
    runs: Sequence["Run"],
    root: Path,
    workers: int | None,
    ray: str | None,
    retry_failed: bool,
    dry_run: bool,
    listed: bool,
    fleet: int | None,
) -> int:
    """Makes runs; returns how many have failed or are damaged."""
    with quick_imports():
        from kvt.study.runner import make_runs

    return make_runs(runs, root, workers, ray, retry_failed, dry_run, listed, fleet)


def _runs_of(grids: Sequence["Grid"]) -> list["Run"]:
    """The runs of all, each once."""
    with quick_imports():
        from kvt.study.grid import each_once

    return each_once([run for grid in grids for run in grid.runs])


def _targets(grids: Sequence["Grid"], root: Path, out: Path | None) -> list[Path]:
    """The folders of reports, `out` or beside the runs, if these can be written there."""
    targets = [out or root / "reports" / f"{grid.name}-{grid.scale}" for grid in grids]
    require_folder(root, "--folder", write=out is None)
    for target in targets:
        require_folder(target, "--out" if out else "--folder", files=REPORT)
    return targets


def _report(grids: Sequence["Grid"], root: Path, targets: Sequence[Path], margin: float) -> None:
    """Writes reports and prints their files."""
    with quick_imports():
        from kvt.reports.report import write_report

    for grid, target in zip(grids, targets, strict=True):
        for path in write_report(grid, root, target, margin):
            print(os.path.relpath(path))


def _exit(failed: int) -> None:
    if failed:
        print(f"error: {failed} runs failed or are damaged: --retry_failed tries them again", file=sys.stderr)
        sys.exit(1)
