"""One run of a study, made, gone on with, or left alone: safe to be asked for any number of times, by anybody."""

import shutil
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import Callback

from kvt.fleet.member import FleetRun, FleetTrainer
from kvt.study.config import Config
from kvt.study.records import DamagedError, Result, read_history, read_result
from kvt.system.console import one_line, user_error
from kvt.system.errors import UserError, resource_limit_message
from kvt.training import results
from kvt.training.callbacks import without_plots
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import RunLogger, last_checkpoint

FAILURE = "failure.json"
MAX_ERROR_CHARS = 300
"""Characters of a message: one that does not fit into a pipe would hold up the process that sends it."""


class State(StrEnum):
    """How a run stands."""

    NEW = "to run"
    STARTED = "begun"
    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    DAMAGED = "damaged"
    ELSEWHERE = "runs elsewhere"
    STUCK = "stuck"  # at a limit of the machine, which the next run would meet, too


def tally(states: Iterable[State]) -> str:
    """How many runs stand how.

    >>> tally([State.NEW, State.FINISHED, State.NEW])
    '3 runs: 2 to run, 1 finished'
    """
    counts = Counter(states)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{counts.total()} runs: {', '.join(parts)}"


FAULTY = (State.FAILED, State.DAMAGED)
"""What is made again only where that is asked for."""
DONE = (State.FINISHED, State.DIVERGED, *FAULTY)


@dataclass(frozen=True)
class Job:
    """A run to be made; what a worker is sent.

    Attributes:
        config: of the run.
        folder: of its own, <study folder>/<task>/<attn>/<name>.
        data_dir: where data sets lie.
        others: jobs to be trained together with this one, in one fleet.
    """

    config: Config
    folder: Path
    data_dir: str
    others: tuple["Job", ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    state: State
    message: str = ""


class Record(NamedTuple):
    """What lies in a run's folder.

    Attributes:
        state: how the run stands.
        message: why it has failed, has diverged or is damaged, in one line; the files have all of it.
        result: of one that has finished or diverged.
        history: likewise, if there is one.
    """

    state: State
    message: str = ""
    result: Result | None = None
    history: pd.DataFrame | None = None


def record_of(folder: Path) -> Record:
    """What lies in a run's folder."""
    try:
        if (result := read_result(folder)) is not None:
            state = State.DIVERGED if "diverged" in result else State.FINISHED
            return Record(state, _short(result.get("diverged", "")), result, read_history(folder))
    except DamagedError as error:
        return Record(State.DAMAGED, _short(str(error)))
    if (folder / FAILURE).exists():
        failure = results.read_json(folder / FAILURE) or {}
        return Record(State.FAILED, _short(str(failure.get("error", "unknown"))))
    return Record(State.STARTED if folder.exists() else State.NEW)


def _short(message: str) -> str:
    return f"{one_line(message):.{MAX_ERROR_CHARS}}"


def step_of(folder: Path) -> int:
    """The optimiser step that a run goes on from; 0 where nothing is there to go on with."""
    with suppress(UserError):
        checkpoint = read_checkpoint(last_checkpoint(folder))
        return int(checkpoint["global_step"]) if "optimizer_states" in checkpoint else 0
    return 0


def write_failure(job: Job, error: str, trace: str = "") -> Outcome:
    """Keeps the error of a run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    content = {"error": error, "traceback": trace, **results.environment(), "config": job.config}
    results.write_json(job.folder / FAILURE, content)
    return Outcome(State.FAILED, _short(error))


def lock_of(root: Path, name: str) -> FileLock:
    """What a process holds that is at the run of this name; raises `Timeout` where another has it."""
    path = root / ".locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, timeout=0)


def is_free(job: Job) -> bool:
    """Whether no process is at the run."""
    try:
        with _lock(job.folder):
            return True
    except Timeout:
        return False


def outcome_of(job: Job) -> Outcome | None:
    """What has become of a job; None if it is still to be made."""
    record = record_of(job.folder)
    return Outcome(record.state, record.message) if record.state in DONE else None


def forget(folder: Path) -> None:
    """Makes a run that has failed, or is damaged, one to be made; leaves it to another process that is at it.

    One that has failed goes on from its last checkpoint, of one that is damaged nothing stays.
    """
    with suppress(Timeout), _lock(folder):
        match record_of(folder).state:
            case State.FAILED:
                (folder / FAILURE).unlink()
            case State.DAMAGED:
                shutil.rmtree(folder)


def execute(job: Job) -> Outcome:
    """Makes the run, or goes on with it, unless it is done or another process is at it.

    Its fleet comes with it: what becomes of the others is for `outcome_of` to say. What fails together is made run by
    run, here, or where this process dies of it, by whoever asked for it.
    """
    if job.others:
        _execute_together([job, *job.others])
        for other in job.others:
            execute(other)
    try:
        with _lock(job.folder):
            return _execute(job)
    except Timeout:
        return Outcome(State.ELSEWHERE)
    except OSError as error:
        if (limit := resource_limit_message(error)) is not None:
            return Outcome(State.STUCK, f"{limit:.{MAX_ERROR_CHARS}}")
        raise


def _execute(job: Job) -> Outcome:
    if (outcome := outcome_of(job)) is not None:
        return outcome
    try:
        return _train(job)
    except Exception as error:
        if (limit := resource_limit_message(error, job.folder)) is not None:
            return Outcome(State.STUCK, f"{limit:.{MAX_ERROR_CHARS}}")
        return write_failure(job, reason(error), traceback.format_exc())


def reason(error: Exception) -> str:
    """An exception in one line."""
    return " ".join((user_error(error) or f"{type(error).__name__}: {error}").split())


def _execute_together(jobs: Sequence[Job]) -> None:
    with ExitStack() as locks:
        mine = []
        for job in jobs:
            with suppress(Timeout, OSError):
                locks.enter_context(_lock(job.folder))
                mine.append(job)
        todo = [job for job in mine if outcome_of(job) is None]
        try:
            FleetTrainer([partial(_begin, job) for job in todo]).hold()
        except Exception:
            traceback.print_exc()  # into the log; alone, each will meet its own error
        for job in todo:
            if outcome_of(job) is not None:
                last_checkpoint(job.folder).unlink(missing_ok=True)


def _begin(job: Job, meeting: FleetTrainer) -> None:
    _StudyMember(_words(job), job.folder, meeting=meeting)


def _train(job: Job) -> Outcome:
    _StudyCLI(_words(job), job.folder)
    if (outcome := outcome_of(job)) is None:
        raise RuntimeError(f"the run has ended without a result in {job.folder}")
    last_checkpoint(job.folder).unlink(missing_ok=True)  # nothing is left to go on with; best.ckpt stays
    return outcome


def _words(job: Job) -> list[str]:
    """What the command line is told, once what cannot be gone on with is out of the way."""
    words = [
        f"--config={yaml.safe_dump(job.config)}",
        f"--data_dir={job.data_dir}",
        "--devices=1",
        "--enable_progress_bar=false",
    ]
    if step_of(job.folder):
        words.append(f"--ckpt_path={last_checkpoint(job.folder)}")
    else:
        shutil.rmtree(job.folder, ignore_errors=True)  # what a process left that died before its first checkpoint
    return words


class _StudyCLI(CLI):
    """`fit` and its test, in a folder with a name of its own, without pictures."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._folder = folder
        super().__init__(["fit", *words], test=True)

    def callbacks_of_fit(self, config: Any) -> list[Callback]:
        return without_plots(super().callbacks_of_fit(config))

    def logger(self, root: Path) -> RunLogger:
        return RunLogger(self._folder.parent, self._folder.name)


class _StudyMember(FleetRun, _StudyCLI):
    """The same in a fleet."""


def _lock(folder: Path) -> FileLock:
    return lock_of(folder.parents[2], folder.name)
