"""Make one run of a study: train it, resume it, or leave it to the process that is making it."""

import shutil
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import Callback

from kvt.study.config import Config
from kvt.study.grid import Run
from kvt.study.outcomes import FAILURE, FAULTY, TERMINAL, Outcome, State, read_outcome, short
from kvt.system.console import user_error
from kvt.system.errors import UserError, resource_limit_message
from kvt.system.hardware import environment
from kvt.training import results
from kvt.training.callbacks import AttentionMaps, SampleText
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import RunLogger, last_checkpoint


@dataclass(frozen=True)
class Job:
    config: Config
    folder: Path  # <folder of the study>/<task>/<attn>/<name>
    data_dir: str


def outcome_of(job: Job) -> Outcome | None:
    """Return a run's outcome without its history, or None if the run is not done."""
    outcome = read_outcome(job.folder, job.config)
    return outcome._replace(history=None) if outcome.state in TERMINAL else None


def resume_step(folder: Path) -> int:
    """Return the optimizer step that a run resumes from, 0 without a usable checkpoint."""
    with suppress(UserError):
        checkpoint = read_checkpoint(last_checkpoint(folder))
        return int(checkpoint["global_step"]) if "optimizer_states" in checkpoint else 0
    return 0


def write_failure(job: Job, error: str, trace: str = "") -> Outcome:
    job.folder.mkdir(parents=True, exist_ok=True)
    content = {"error": error, "traceback": trace, **environment(), "config": job.config}
    results.write_json(job.folder / FAILURE, content)
    return Outcome(State.FAILED, short(error))


def run_lock(folder: Path) -> FileLock:
    """Return the lock of the run in this folder; acquiring it raises `Timeout` while another process holds it."""
    path = folder.parents[2] / ".locks" / f"{folder.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, timeout=0)


def is_free(folder: Path) -> bool:
    try:
        with run_lock(folder):
            return True
    except Timeout:
        return False


def forget(run: Run, root: Path) -> None:
    """Delete a run's failure.json, or all of a damaged or outdated run, unless another process is making it."""
    folder = run.folder(root)
    with suppress(Timeout), run_lock(folder):
        state = read_outcome(folder, run.config).state
        if state == State.FAILED:
            (folder / FAILURE).unlink()
        elif state in FAULTY:
            shutil.rmtree(folder)


def execute(job: Job) -> Outcome:
    """Train or resume the run, unless it is done or another process is making it."""
    try:
        with run_lock(job.folder):
            try:
                return outcome_of(job) or _train(job)
            except Exception as error:
                if resource_limit_message(error) is not None:
                    raise
                return write_failure(job, reason(error), traceback.format_exc())
    except Timeout:
        return Outcome(State.LOCKED)
    except Exception as error:
        if (limit := resource_limit_message(error, job.folder)) is None:
            raise
        return Outcome(State.STUCK, short(limit))


def reason(error: Exception) -> str:
    return " ".join((user_error(error) or f"{type(error).__name__}: {error}").split())


def cli_args(job: Job) -> list[str]:
    """Return the flags of `kvt fit` for a run, after removing what cannot be resumed."""
    words = [f"--config={yaml.safe_dump(job.config)}", f"--data_dir={job.data_dir}"]
    words += ["--devices=1", "--enable_progress_bar=false"]
    if resume_step(job.folder):
        return [*words, f"--ckpt_path={last_checkpoint(job.folder)}"]
    shutil.rmtree(job.folder, ignore_errors=True)  # left by a process that died before its first checkpoint
    return words


class StudyCLI(CLI):
    """`kvt fit` with its test, in a given folder and without pictures."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._folder = folder
        super().__init__(["fit", *words], test=True)

    def callbacks_of_fit(self, config: Any) -> list[Callback]:
        plots = AttentionMaps | SampleText  # which would take longer than the training of a small model
        return [callback for callback in super().callbacks_of_fit(config) if not isinstance(callback, plots)]

    def logger(self, root: Path) -> RunLogger:
        return RunLogger(self._folder.parent, self._folder.name)


def _train(job: Job) -> Outcome:
    StudyCLI(cli_args(job), job.folder)
    outcome = outcome_of(job)
    assert outcome is not None, "training has ended without a result"
    last_checkpoint(job.folder).unlink(missing_ok=True)  # best.ckpt stays
    return outcome
