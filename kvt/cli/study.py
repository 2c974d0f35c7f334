"""The commands `kvt study run`, `report` and `record`, and `kvt reproduce`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvt.system import (
    GRIDS,
    UserError,
    find_yaml,
    parse_yaml,
    printable,
    require_folder,
    say,
    tell,
    unknown,
    user_path,
    yaml_names,
)

if TYPE_CHECKING:  # functions import slow modules only when needed, as in kvt/cli/main.py
    from kvt.study.grid import Grid, Run
    from kvt.study.outcomes import Outcomes

FOLDER = "lightning_logs/study"
TABLE1 = "table1"
FOLDERS, NO_FOLDERS, ALL = [FOLDER], list[str](), list[str]()


def study_run(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    list: bool = False,
    print_grid: bool = False,
    only: list[str] = ALL,
    set_: list[str] = ALL,
    from_: list[str] = NO_FOLDERS,
) -> None:
    """Train the runs of a grid that are not done yet.

    You may stop the command at any time. The same command resumes killed runs from their last checkpoints. It does not
    train failed runs again. Several commands, on the same or on several machines, may use the same
    folder and share the runs.

    Args:
        grids: YAML files, or names of kvt's grids, such as table2.
        scale: name of a scale of the grid, such as smoke, laptop or paper; default: laptop, or else the first scale.
        folder: folder of the runs. Each run is written to the subfolder <task>/<attn>/<name>.
        workers: number of runs to train at once. Each run gets a share of the cores, or a GPU. A GPU has memory for
            several small models. Default: the number of GPUs, or the number of cores if there is no GPU.
        ray: address of a Ray cluster, or "auto" for the cluster of this machine. All machines of the cluster must have
            the folder and the data at the same path.
        retry_failed: train failed runs again from their last checkpoint, or from the beginning if a file of the run is
            damaged or the folder has other settings.
        dry_run: print the number of finished runs of each task, and the time that the other runs will take, estimated
            from finished and recorded runs.
        list: print each run and its state, without training.
        print_grid: print the YAML file of the grid, to edit it as a grid of your own.
        only: train only the runs with these settings, such as --only task=sort dim=64. Here task and seed are settings.
        set_: replace axes of the grid in all its tasks, such as --set norm=post lr=[1e-3,1e-4].
        from_: records, or folders of runs. The command does not train runs again that these folders contain.
    """
    if print_grid:
        for grid in grids:
            tell(find_yaml(grid, GRIDS).read_text())
        return
    from kvt.study.runner import make_runs

    parsed, runs = _read(grids, scale, only, set_)
    root, recorded = user_path(folder).resolve(), _find(runs, from_) if from_ else {}
    how: dict[str, Any] = {"workers": workers, "ray": ray, "retry_failed": retry_failed}
    failed = make_runs(runs, root, **how, dry_run=dry_run, listed=list, recorded=recorded)
    if not (dry_run or list):
        known = {name: outcomes for name, outcomes in recorded.items() if outcomes}
        _tell_verdicts(parsed, [{**outcomes, **known} for outcomes in _outcomes(parsed, root)])
    _exit(failed)


def study_report(
    *grids: str,
    scale: str | None = None,
    folder: str = FOLDER,
    out: str | None = None,
    set_: list[str] = ALL,
    from_: list[str] = NO_FOLDERS,
    format: str | None = None,
) -> None:
    """Write the report of a grid.

    The report consists of report.md with its pictures, tables.csv with the numbers of the tables, and runs.csv with a
    row for each run.

    Args:
        grids: YAML files, or names of kvt's grids, such as table2.
        scale: name of a scale of the grid; default: laptop, or else the first scale.
        folder: folder of the runs.
        out: folder of the report; default: reports/<grid>-<scale> in the folder of the runs.
        set_: the changes of the grid, as in kvt study run.
        from_: records, or folders of runs. The report uses their results instead of the runs in --folder.
        format: pdf also writes each picture as PDF, for papers.
    """
    if format not in (None, "pdf"):
        raise unknown("--format", format, ["pdf"])
    parsed, runs = _read(grids, scale, changes=set_)
    root = user_path(folder).resolve()
    targets = _targets(parsed, root, out)
    found = _find(runs, from_) if from_ else None
    require_folder(root, "--folder", write=False)
    outcomes = _outcomes(parsed, root) if found is None else [found] * len(parsed)
    _report(parsed, outcomes, targets, root if found is None else None, format == "pdf")


def study_record(*grids: str, out: str, scale: str | None = None, from_: list[str] = FOLDERS) -> None:
    """Collect the results of a grid in a record: a small folder without checkpoints, to keep and to share.

    The command adds new results to an existing record. A record also keeps the results of repeated runs.

    Args:
        grids: a YAML file, or the name of one of kvt's grids, such as table2.
        out: folder of the record.
        scale: name of a scale of the grid; default: laptop, or else the first scale.
        from_: folders of runs, and other records. The folders may have any names.
    """
    if len(grids) > 1:
        raise UserError("--out takes one record: pass one grid")
    (grid,), _ = _read(grids, scale)
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
    """Train the runs of kvt's grids, such as the paper's tables and figures, and write their reports.

    The reports of table2 and table3 contain Figures 2 and 4. You may stop the command at any time. The same command
    resumes the runs.

    Args:
        names: table2, table3, figure3, figure5, figure6, figure7, three-projections, cycles, shift, directions, leak,
            recall, keyless, cache, retrofit, follow-up, lengths or lacks; or table1, which measures the cost of
            attention with kvt bench.
        all: select all names.
        scale: smoke (minutes; checks the code with models that learn almost nothing), laptop (an evening) or paper
            (days).
        folder: folder of the runs and of the reports.
        workers: number of runs to train at once; default: the number of GPUs, or else of cores.
        ray: address of a Ray cluster, or "auto" for the cluster of this machine.
        retry_failed: train failed runs again.
        dry_run: print the number of finished runs, and the time that the other runs will take.
        list: print each run and its state, without training.
        only: train only the runs with these settings, such as --only task=sort dim=64. The reports contain all finished
            runs. table1 ignores these settings.
    """
    from kvt.study.runner import make_runs

    names_of_all = [*yaml_names(GRIDS), TABLE1]
    chosen = names_of_all if all else [*dict.fromkeys(names)]
    if not chosen:
        raise UserError(f"pass tables or figures, or --all: {', '.join(names_of_all)}")
    if strange := [name for name in chosen if name not in names_of_all]:
        raise unknown("table or figure", strange[0], names_of_all)
    root, make, failed = user_path(folder).resolve(), not (dry_run or list), 0
    if of_grids := [str(GRIDS / f"{name}.yaml") for name in chosen if name != TABLE1]:
        grids, runs = _read(of_grids, scale, only)
        how: dict[str, Any] = {"workers": workers, "ray": ray, "retry_failed": retry_failed}
        targets = _targets(grids, root) if make else []
        failed = make_runs(runs, root, **how, dry_run=dry_run, listed=list)
        if make:
            outcomes = _outcomes(grids, root)
            _report(grids, outcomes, targets, root)
            _tell_verdicts(grids, outcomes)
    if TABLE1 in chosen and not make:
        tell(f"{TABLE1} has no runs: kvt bench measures it in minutes")
    elif TABLE1 in chosen:
        from kvt.bench import bench

        (root / "reports").mkdir(parents=True, exist_ok=True)
        sizes: dict[str, Any] = {"n": [16], "d": [64], "repeats": 3} if scale == "smoke" else {}
        bench(**sizes, out=str(root / "reports" / TABLE1), plot=True)
    _exit(failed)


def _read(
    names: Sequence[str], scale: str | None, only: Sequence[str] = (), changes: Sequence[str] = ()
) -> tuple[list["Grid"], list["Run"]]:
    """Return the grids and their runs. With `only`, return the runs with these settings and the grids of these runs."""
    if not names:
        raise UserError("pass a grid, such as table2")
    from kvt.reports.section import require_report
    from kvt.study.grid import deduplicate, read_grid, select

    grids = [read_grid(name, scale, changes) for name in names]
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


def _sources(folders: Sequence[str]) -> list[Path]:
    paths = [user_path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"--from {path}: is not a folder")
    return paths


def _find(runs: Sequence["Run"], folders: Sequence[str]) -> "Outcomes":
    from kvt.study.records import find_outcomes

    return find_outcomes(runs, _sources(folders))


def _targets(grids: Sequence["Grid"], root: Path, out: str | None = None) -> list[Path]:
    """Return the folders of reports; raise UserError if kvt cannot write to one of these folders."""
    targets = [root / "reports" / grid.report if out is None else user_path(out) for grid in grids]
    for target in targets:
        require_folder(target, "--folder" if out is None else "--out")
        if (count := targets.count(target)) > 1:
            raise UserError(f"{count} reports would be in {target}: write one at a time, each with its own --out")
    return targets


def _outcomes(grids: Sequence["Grid"], root: Path) -> "list[Outcomes]":
    """Return the outcomes of the runs of each grid, read from the runs' folders inside `root`."""
    from kvt.study.outcomes import read_outcomes

    return [read_outcomes(grid.runs, root) for grid in grids]


def _report(
    grids: Sequence["Grid"],
    outcomes: "Sequence[Outcomes]",
    targets: Sequence[Path],
    root: Path | None = None,
    pdf: bool = False,
) -> None:
    from kvt.reports.report import write_report

    for grid, found, target in zip(grids, outcomes, targets, strict=True):
        for path in write_report(grid, found, target, root, pdf):
            tell(printable(os.path.relpath(path)))


def _tell_verdicts(grids: Sequence["Grid"], outcomes: "Sequence[Outcomes]") -> None:
    from kvt.reports.sections import verdicts

    for grid, found in zip(grids, outcomes, strict=True):
        for line in verdicts(grid, found):
            tell(line)


def _exit(failed: int) -> None:
    if failed:
        say(f"error: {failed} runs failed: rerun with --retry_failed")
        sys.exit(1)
