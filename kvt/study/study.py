"""Working off a grid: what is finished is left alone, the rest is handed to workers."""

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

import torch
from tqdm import tqdm

from kvt.errors import UserError, require_positive
from kvt.files import user_path
from kvt.study.grid import Run, varied
from kvt.study.results import Times, headline
from kvt.study.work import DONE, Job, Outcome, State, read_failure, read_result, state_of
from kvt.study.workers import Engine, LocalWorkers, cores

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed} so far, {postfix} left"
PAUSE = 1.0
"""Seconds between two looks at runs that another study is making."""


def work_off(
    runs: Sequence[Run], root: Path, data_dir: str, engine: Engine, retry_failed: bool = False
) -> Iterator[tuple[Run, Outcome]]:
    """Makes what is not done yet, and yields each run as it gets done, here or by another study in the same folder.

    Args:
        runs: to be made.
        root: the folder of all runs.
        data_dir: where data sets lie.
        engine: what makes them.
        retry_failed: whether to try again what failed before.
    """
    by_name = {run.name: run for run in runs}
    pending = deque(Job(run.config, run.folder(root), data_dir, retry_failed) for run in runs)
    elsewhere = 0  # answers in a row that say so
    while pending or engine.busy:
        while pending and engine.room:
            engine.submit(pending.popleft())
        job, outcome = engine.wait()
        if outcome.state != State.ELSEWHERE:
            elsewhere = 0
            yield by_name[job.folder.name], outcome
            continue
        pending.append(job)
        elsewhere += 1
        if elsewhere > len(pending):
            sleep(PAUSE)
            elsewhere = 0


def make_runs(
    runs: Sequence[Run], root: Path, workers: int | None, ray: str | None, retry_failed: bool, dry_run: bool
) -> int:
    """Makes what is not done yet, with a progress bar and a line a run; see `kvt.study.command.study_run`.

    Returns:
        How many runs have failed, now or before.

    Raises:
        UserError: the disk is full.
        SystemExit: with code 130, at Ctrl-C.
    """
    if workers is not None:
        require_positive(workers=workers)
    workers = workers or torch.cuda.device_count() or len(cores())
    states = {run.name: state_of(run.folder(root)) for run in runs}
    todo = [run for run in runs if not _is_done(states[run.name], retry_failed)]
    names = varied(runs)
    texts = {run.name: run.describe(names) for run in runs}
    times = Times(runs, root)
    print(_summary(states))
    if dry_run:
        for run in runs:
            print(f"{states[run.name]:<10} {run.name} {texts[run.name]}")
        print(f"{len(todo)} to make, in about {times.left(todo, workers)} with {workers} workers")
        return 0
    failed = [run for run in runs if states[run.name] == State.FAILED and not retry_failed]
    for run in failed:
        print(f"failed before, {texts[run.name]}: {read_failure(run.folder(root))}; --retry_failed tries it again")
    if not todo:
        return len(failed)
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    left = {run.name: run for run in todo}
    engine = _engine(workers, ray)
    with tqdm(total=len(runs), initial=len(runs) - len(todo), smoothing=0, bar_format=BAR) as bar:
        bar.set_postfix_str(times.left(todo, engine.workers))
        try:
            for run, outcome in work_off(todo, root, data_dir, engine, retry_failed):
                if outcome.state == State.NO_SPACE:
                    raise UserError(f"--folder {root}: no space left there: make room, and the same command goes on")
                del left[run.name]
                times.add(run)
                bar.update()
                found = outcome.message or headline(read_result(run.folder(root)))
                bar.write(f"{outcome.state:<8} {texts[run.name]}  {found}")
                bar.set_postfix_str(times.left([*left.values()], engine.workers))
                failed += [run] if outcome.state == State.FAILED else []
        except KeyboardInterrupt:
            bar.close()
            print("stopped: the same command goes on", file=sys.stderr)
            sys.exit(130)
        finally:
            engine.stop()
    return len(failed)


def _is_done(state: State, retry_failed: bool) -> bool:
    return state in DONE and not (retry_failed and state == State.FAILED)


def _summary(states: dict[str, State]) -> str:
    counts = Counter(states.values())
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{len(states)} runs: {', '.join(parts)}"


def _engine(workers: int, ray: str | None) -> Engine:
    if ray is None:
        return LocalWorkers(workers)
    try:
        from kvt.study.on_ray import RayCluster
    except ModuleNotFoundError as error:
        raise UserError('--ray needs: pip install "kvt[ray]"') from error
    return RayCluster(ray)
