"""`kvt study run`."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from kvt.errors import UserError, require_positive
from kvt.files import user_path
from kvt.study.grid import Grid, Run, read_grid
from kvt.study.results import Times, headline
from kvt.study.study import work_off
from kvt.study.work import DONE, State, read_failure, read_result, state_of
from kvt.study.workers import Engine, LocalWorkers

FOLDER = "lightning_logs/study"


def study_run(
    *grids: str,
    scale: str = "laptop",
    folder: str = FOLDER,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    runs: int | None = None,
) -> None:
    """Makes the runs of a grid that are not there yet.

    A run is named by a hash of all its settings. What is finished is left alone, what was killed goes on from its last
    checkpoint, what failed is recorded and left. Stop it as you like: the same command goes on. Several studies, on one
    machine or many, may share a folder and the work.

    Args:
        grids: YAML files, such as experiments/grids/table2.yaml.
        scale: which of the grid's scales: smoke, laptop or paper.
        folder: where runs land, <task>/<attn>/<name>.
        workers: processes at once, each on its share of the cores or on a GPU; default: one a core, or one a GPU.
        ray: address of a Ray cluster to run on instead, "auto" for the one that this machine belongs to; all its
            machines must see the folder and the data under the same path.
        retry_failed: try again what failed before.
        dry_run: list the runs and how they stand, with an estimate of the time, and make none.
        runs: how many runs you expect, as --dry_run says; another number is an error.
    """
    chosen = [read_grid(user_path(grid), scale) for grid in grids]
    if not chosen:
        raise UserError("name a grid, such as experiments/grids/table2.yaml")
    make_runs(chosen, user_path(folder).resolve(), workers, ray, retry_failed, dry_run, runs)


def make_runs(
    grids: Sequence[Grid],
    root: Path,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    expected: int | None = None,
) -> None:
    """Works off the runs of grids, with a progress bar and a line a run; see `study_run`.

    Raises:
        UserError: a setting out of range; the disk is full; another number of runs than expected.
        SystemExit: with code 1, at the end, if a run has failed.
    """
    runs = [*{run.name: run for grid in grids for run in grid.runs}.values()]
    if expected is not None and expected != len(runs):
        raise UserError(f"--runs {expected}: it is {len(runs)} runs; --dry_run lists them")
    if workers is not None:
        require_positive(workers=workers)
    states = {run.name: state_of(run.folder(root)) for run in runs}
    todo = [run for run in runs if not _is_done(states[run.name], retry_failed)]
    print(_summary(states))
    workers = workers or torch.cuda.device_count() or len(os.sched_getaffinity(0))
    times = Times(runs, root)
    if dry_run:
        for run in runs:
            print(f"{states[run.name]:<10} {run.name} {run}")
        print(f"about {times.left(todo, workers)} with {workers} workers" if todo else "nothing to do")
        return
    failed = [run for run in runs if states[run.name] == State.FAILED and not retry_failed]
    for run in failed:
        print(f"{State.FAILED} before, {run}: {read_failure(run.folder(root))}; --retry_failed tries it again")
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    engine = _engine(workers, ray) if todo else None
    bar = tqdm(total=len(runs), initial=len(runs) - len(todo), unit="run", smoothing=0, bar_format=BAR)
    with bar:
        left = {run.name: run for run in todo}
        bar.set_postfix_str(times.left(todo, workers))
        for run, outcome in work_off(todo, root, data_dir, engine, retry_failed) if engine else ():
            if outcome.state == State.NO_SPACE:
                raise UserError(f"--folder {root}: no space left there: make room, and the same command goes on")
            del left[run.name]
            times.add(run)
            bar.update()
            bar.write(f"{outcome.state:<8} {run}  {outcome.message or headline(read_result(run.folder(root)))}")
            bar.set_postfix_str(times.left([*left.values()], workers))
            failed += [run] if outcome.state == State.FAILED else []
    if failed:
        print(f"error: {len(failed)} of {len(runs)} runs failed: --retry_failed tries them again", file=sys.stderr)
        sys.exit(1)


BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed} so far, {postfix} left"


def _is_done(state: State, retry_failed: bool) -> bool:
    return state in DONE and not (retry_failed and state == State.FAILED)


def _summary(states: dict[str, State]) -> str:
    counts = Counter(states.values())
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{len(states)} runs: {', '.join(parts)}"


def _engine(workers: int, ray: str | None) -> Engine:
    if ray is None:
        return LocalWorkers(workers)
    from kvt.study.on_ray import RayCluster

    return RayCluster(ray)
