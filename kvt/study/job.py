"""Trains or resumes one run of a study, unless another process is training the run."""

import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from kvt.run import results
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig
from kvt.run.fit import fit, locked
from kvt.run.folder import LAST, empty
from kvt.run.load_checkpoint import Checkpoint
from kvt.study.grid import Run
from kvt.study.outcomes import FAILURE, FAULTY, TERMINAL, Outcome, State, read_outcome
from kvt.system.errors import argument_names, mistake_in
from kvt.system.hardware import environment
from kvt.system.quoting import one_line


@dataclass(frozen=True)
class Job:
    config: RunConfig
    folder: Path  # <folder of the study>/<task>/<attn>/<name>
    data_dir: str


def saved_steps(folder: Path) -> int:
    """Return the number of training steps in a run's last.ckpt; 0 if the file does not exist."""
    last = folder / LAST
    return Checkpoint(last).step if last.is_file() else 0


def write_failure(job: Job, error: str, trace: str = "") -> Outcome:
    job.folder.mkdir(parents=True, exist_ok=True)
    content = {"error": error, "traceback": trace, **environment(), "config": job.config.as_dict()}
    results.write_json(job.folder / FAILURE, content)
    return Outcome(State.FAILED, one_line(error))


def forget(run: Run, root: Path) -> None:
    """Delete the failure.json of a failed run, or all files of a damaged or outdated run, if no process trains it."""
    folder = run.folder(root)
    with suppress(Timeout), locked(folder):
        state = read_outcome(folder, run.config).state
        if state == State.FAILED:
            (folder / FAILURE).unlink()
        elif state in FAULTY:
            empty(folder)


def execute(job: Job) -> Outcome:
    """Train or resume a run that is not done and that no other process is training; return the run's outcome."""
    try:
        with locked(job.folder):
            try:
                outcome = read_outcome(job.folder, job.config, history=False)
                if outcome.state not in TERMINAL:
                    train_job(job)
                    outcome = read_outcome(job.folder, job.config, history=False)
                return outcome
            except Exception as error:
                if isinstance(mistake_in(error), OSError):
                    raise
                return write_failure(job, reason(error), traceback.format_exc())
    except Timeout:
        return Outcome(State.LOCKED)
    except Exception as error:
        if not isinstance(mistake := mistake_in(error), OSError):
            raise
        return Outcome(State.STUCK, one_line(str(mistake)))


def reason(error: Exception) -> str:
    """Return an error's message in one line. Add the type of the error unless a mistake of the user caused it."""
    return " ".join(str(mistake_in(error) or f"{type(error).__name__}: {error}").split())


def train_job(job: Job) -> None:
    """Train a run, or resume it from its last checkpoint."""
    data = {"data_dir": job.data_dir} if "data_dir" in argument_names(job.config.classes["data"]) else {}
    config = job.config.merged({"data": data, "trainer": {"devices": 1, "enable_progress_bar": False}})
    resume = saved_steps(job.folder) > 0
    if not resume:
        empty(job.folder)  # deletes the files of a run whose process died before the first checkpoint
    # quiet=True draws no pictures, because drawing takes longer than training a small model
    fit(KvtCLI(config.as_dict()), job.folder, resume=resume, quiet=True)
    (job.folder / LAST).unlink(missing_ok=True)  # keeps only best.ckpt
