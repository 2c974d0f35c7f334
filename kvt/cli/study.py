"""The commands `kvt study run`, `report` and `record`, and `kvt reproduce`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvt.system.console import collect_garbage_seldom, quick_imports, say, tell
from kvt.system.errors import UserError, unknown
from kvt.system.files import GRIDS, parse_yaml, require_folder, user_path, yaml_names
from kvt.system.quoting import printable

if TYPE_CHECKING:  # as in kvt/cli/main.py, what takes seconds to import is imported where it is used
    from kvt.study.grid import Grid, Run
    from kvt.study.outcomes import Outcomes

FOLDER = "lightning_logs/study"
TABLE1 = "table1"
FOLDERS, NO_FOLDERS, NO_FORMATS, ALL = [FOLDER], list[str](), list[str](), list[str]()


def study_run(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    only: list[str] = ALL,
    from_: list[str] = NO_FOLDERS,
) -> None:
    """Make the runs of a grid that are not done yet.

    A killed run resumes from its last checkpoint, a failed, damaged or outdated one is left as it is. You may
    stop this at any time: the same command resumes. Several studies, on one machine or many, may share a folder and
    the work.

    Args:
        grids: YAML files, or names of grids that come with kvt, such as table2.
        scale: one of the grid's scales, such as smoke, laptop or paper; default: laptop, or else the first.
        folder: where runs are written, <task>/<attn>/<name>.
        workers: processes at once, each on its share of the cores or on a GPU; default: one a GPU, or one a core where
            there is none. A GPU has room for several small models.
        ray: address of a Ray cluster whose machines see folder and data under one path, "auto" for this machine's.
        retry_failed: make failed runs again, from their last checkpoint, and damaged or outdated ones, from the start.
        dry_run: print how many runs of each task are done, and how long the others take, which follows from
            finished and recorded runs.
        list: print each run and its state, and make none.
        only: make only runs with these settings, such as --only task=sort dim=64; task and seed count as settings.
        from_: records, or folders of runs; what they have is not made again.
    """
    parsed, runs = _read(grids, scale, only)
    root, recorded = _root(folder), _find(runs, from_) if from_ else {}
    how = {"workers": workers, "ray": ray, "retry_failed": retry_failed, "dry_run": dry_run, "listed": list}
    failed = _make(runs, root, **how, recorded=recorded)
    if not (dry_run or list):
        _tell_verdicts(parsed, root, recorded)
    _exit(failed)


def study_report(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    out: str | None = None,
    from_: list[str] = NO_FOLDERS,
    format: list[str] = NO_FORMATS,
) -> None:
    """Write the report of a grid.

    It is report.md with its pictures, report.html with them inside, explorer.html to look at all runs, tables.csv with
    all numbers, and runs.csv.

    Args:
        grids: YAML files, or names of grids that come with kvt, such as table2.
        scale: one of the grid's scales; default: as in kvt study run.
        folder: where the runs are.
        out: a folder for the report; default: reports/<grid>-<scale> in the folder of the runs.
        from_: records, or folders of runs, to report instead of --folder.
        format: for papers, besides: latex, all tables in tables.tex; pdf, each picture as PDF; or both.
    """
    with quick_imports():
        from kvt.reports.report import FORMATS
    if strange := [name for name in format if name not in FORMATS]:
        raise unknown("--format", strange[0], FORMATS)
    parsed, runs = _read(grids, scale)
    root = _root(folder)
    targets = _targets(parsed, root, out)
    _report(parsed, root, targets, _find(runs, from_) if from_ else None, format)


def study_record(*grids: str, out: str, scale: str | None = None, from_: list[str] = FOLDERS) -> None:
    """Collect the results of a grid in a record: a small folder without checkpoints, to keep and to share.

    A record that exists is widened: its results stay, and results of runs that were made again are added.

    Args:
        grids: a YAML file, or the name of a grid that comes with kvt, such as table2.
        out: the folder of the record.
        scale: one of the grid's scales; default: as in kvt study run.
        from_: folders of runs, whatever their names, and other records.
    """
    if len(grids) > 1:
        raise UserError("--out takes one record: pass one grid")
    (grid,), _ = _read(grids, scale)
    with quick_imports():
        from kvt.study.records import widen_record

    target = user_path(out)
    require_folder(target, "--out")
    tell(widen_record(grid, target, _sources(from_)))


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
    only: list[str] = ALL,
) -> None:
    """Make the runs of grids that come with kvt, the paper's tables and figures among them, and write the reports.

    Figures 2 and 4 come with tables 2 and 3. You may stop this at any time: the same command resumes.

    Args:
        names: table2, table3, figure3, figure5, figure6, figure7, three-projections, cycles, shift, directions, leak,
            recall, keyless, cache, retrofit, follow-up, lengths, lacks; or table1, what attention costs.
        all: all of them.
        scale: smoke (minutes, learns nothing), laptop (an evening) or paper (days).
        folder: where runs and reports are written.
        workers: as in kvt study run.
        ray: as in kvt study run.
        retry_failed: as in kvt study run.
        dry_run: as in kvt study run.
        list: as in kvt study run.
        only: as in kvt study run; the reports have all runs that are done, and table1 takes no settings.
    """
    names_of_all = [*yaml_names(GRIDS), TABLE1]
    chosen = names_of_all if all else [*dict.fromkeys(names)]
    if not chosen:
        raise UserError(f"pass tables or figures, or --all: {', '.join(names_of_all)}")
    if strange := [name for name in chosen if name not in names_of_all]:
        raise unknown("table or figure", strange[0], names_of_all)
    root, make, failed = _root(folder), not (dry_run or list), 0
    if of_grids := [str(GRIDS / f"{name}.yaml") for name in chosen if name != TABLE1]:
        grids, runs = _read(of_grids, scale, only)
        how = {"workers": workers, "ray": ray, "retry_failed": retry_failed}
        how |= {"dry_run": dry_run, "listed": list}
        targets = _targets(grids, root) if make else []
        failed = _make(runs, root, **how)
        if make:
            _report(grids, root, targets)
            _tell_verdicts(grids, root)
    if TABLE1 in chosen and not make:
        tell(f"{TABLE1} has no runs: kvt bench measures it in minutes")
    elif TABLE1 in chosen:
        with quick_imports():
            from kvt.cli.bench import bench

        (root / "reports").mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = {"n": [16], "d": [64], "repeats": 3} if scale == "smoke" else {}
        bench(**sizes, out=str(root / "reports" / TABLE1), plot=True)
    _exit(failed)


def _root(folder: str) -> Path:
    return Path(os.path.realpath(user_path(folder)))  # Path.resolve raises on a link to itself


def _read(names: Sequence[str], scale: str | None, only: Sequence[str] = ()) -> tuple[list["Grid"], list["Run"]]:
    """Return the grids and their runs; with `only`, the runs with these settings, and the grids that have them."""
    if not names:
        raise UserError("pass a grid, such as table2")
    collect_garbage_seldom()
    with quick_imports():
        from kvt.reports.section import require_report
        from kvt.study.grid import deduplicate, read_grid, select

    grids = [read_grid(name, scale) for name in names]
    for grid in grids:
        require_report(grid)
    runs = deduplicate([run for grid in grids for run in grid.runs])
    if not only:
        return grids, runs
    settings = [word.partition("=") for word in " ".join(only).split()]
    if strange := [name for name, sign, _ in settings if not sign]:
        raise UserError(f"--only {strange[0]}: expected settings with a value, such as --only task=sort dim=64")
    runs = [*select(runs, {name: parse_yaml(value, f"--only {name}") for name, _, value in settings}, "--only")]
    return [grid for grid in grids if {run.name for run in grid.runs} & {run.name for run in runs}], runs


def _make(runs: Sequence["Run"], root: Path, **how: Any) -> int:
    with quick_imports():
        from kvt.study.runner import make_runs

    return make_runs(runs, root, **how)


def _sources(folders: Sequence[str]) -> list[Path]:
    paths = [user_path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"--from {path}: is not a folder")
    return paths


def _find(runs: Sequence["Run"], folders: Sequence[str]) -> "Outcomes":
    with quick_imports():
        from kvt.study.records import find_outcomes

    return find_outcomes(runs, _sources(folders))


def _targets(grids: Sequence["Grid"], root: Path, out: str | None = None) -> list[Path]:
    """Return the folders of reports, checked before anything is read or made."""
    targets = [root / "reports" / grid.report if out is None else user_path(out) for grid in grids]
    for target in targets:
        require_folder(target, "--folder" if out is None else "--out")
        if (count := targets.count(target)) > 1:
            raise UserError(f"{count} reports would lie in {target}: write one at a time, each with its own --out")
    return targets


def _report(
    grids: Sequence["Grid"],
    root: Path,
    targets: Sequence[Path],
    found: "Outcomes | None" = None,
    formats: Sequence[str] = (),
) -> None:
    with quick_imports():
        from kvt.reports.report import write_report
        from kvt.study.outcomes import read_outcomes

    require_folder(root, "--folder", write=False)
    for grid, target in zip(grids, targets, strict=True):
        outcomes = read_outcomes(grid.runs, root) if found is None else found
        for path in write_report(grid, outcomes, target, root if found is None else None, formats):
            tell(printable(os.path.relpath(path)))


def _tell_verdicts(grids: Sequence["Grid"], root: Path, recorded: "Outcomes | None" = None) -> None:
    with quick_imports():
        from kvt.reports.sections import verdicts
        from kvt.study.outcomes import read_outcomes

    known = {name: outcomes for name, outcomes in (recorded or {}).items() if outcomes}
    for grid in grids:
        for line in verdicts(grid, {**read_outcomes(grid.runs, root), **known}):
            tell(line)


def _exit(failed: int) -> None:
    if failed:
        say(f"error: {failed} runs failed, are damaged or outdated: rerun with --retry_failed")
        sys.exit(1)
