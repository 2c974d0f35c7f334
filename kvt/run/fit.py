"""Trains, validates, tests or predicts with the Lightning Trainer. A killed run resumes with the same numbers."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import lightning as L
import torch
import yaml
from filelock import FileLock
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from kvt.models.blocks import stacks_of
from kvt.run import results
from kvt.run.callbacks import AtomicCheckpointIO, Best, Last, ProgressBar, Row, RunCallback
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig
from kvt.run.folder import LAST, LOCK, run_of_checkpoint
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.pictures import Shown
from kvt.system import UserError, printable, require_folder, say, silence_libraries, table, user_path, write_atomically
from kvt.tasks import Task, TaskData
from kvt.tasks.schedules import warmup_note
from kvt.tune import use_threads


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Attributes:
        metrics: the first entries of result.json: task, attn, seed, "val/acc", "test/acc", parameters, seconds …
        history: a row for each step with logged metrics.
        folder: the folder with config.yaml, result.json, history.csv and checkpoints; None with --fast_dev_run.
        checkpoint: path of the best checkpoint by the task's `monitor`; None if the run saved no checkpoint.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    history: list[Row] = field(default_factory=list)
    folder: Path | None = None
    checkpoint: Path | None = None

    def __repr__(self) -> str:
        """Return the table that `kvt fit` prints."""
        return table(self.metrics | ({} if self.folder is None else {"run": os.path.relpath(self.folder)}))


def train(
    config: RunConfig,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    test: bool = True,
    callbacks: Sequence[L.Callback] = (),
) -> Result:
    """Train, test the best checkpoint, and return the result.

    Args:
        config: the run's configuration.
        folder: folder for the run's files; default: a new lightning_logs/<task>/<attn>/version_N.
        resume: whether to continue from last.ckpt in the folder; the result is the same as without the stop.
        test: whether to test the best checkpoint if the data have a test split.
        callbacks: further Lightning callbacks.

    Raises:
        UserError: a setting is wrong, the data are missing or unfit, or the folder cannot be used.
    """
    silence_libraries()
    return fit(KvtCLI(config.as_dict()), folder, resume=resume, test=test, callbacks=callbacks)


def fit(
    cli: KvtCLI,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    test: bool = True,
    callbacks: Sequence[L.Callback] = (),
    quiet: bool = False,
) -> Result:
    """Train data and task of `cli`, with the arguments of `train`. With `quiet`, print nothing, and draw nothing.

    If a signal stops a run, the run prints how to resume it, and exits with code 128 + the number of the signal.
    """
    started, task, data = datetime.now(UTC), cli.model, cli.datamodule
    settings, path = cli.run_config.trainer, _place(cli, folder, resume)
    start = _start(cli, path, resume)  # reads the data, too, before a folder is made
    continued = start if start and start.continues else None
    is_first = getattr(rank_zero_only, "rank", 0) == 0  # whether this is the first of the run's processes
    writes = is_first and not settings.get("fast_dev_run")
    if folder is None and writes:
        path = new_folder(path)
    with locked(path) if writes else nullcontext():
        run, best = RunCallback(resume), None
        added: list[L.Callback] = [run] if quiet else [run, Shown()]
        if settings.get("enable_checkpointing") is not False and not settings.get("fast_dev_run"):
            checkpoints = str((path / LAST).parent)
            best = Best(run, task, checkpoints)
            added += [best, Last(checkpoints, validates=settings.get("limit_val_batches") != 0)]
        trainer = make_trainer(cli, [*callbacks, *added], default_root_dir=str(path))
        _prepare(cli, trainer)
        if writes:
            for leftover in path.rglob("*.tmp"):  # files of a killed process
                leftover.unlink()
            if not (path / "config.yaml").exists():
                write_atomically(path / "config.yaml", yaml.safe_dump(cli.run_config.as_dict(), sort_keys=False))
            steps = continued.step if continued else -1
            trainer.loggers = make_loggers(cli, path, steps + 1 if resume else None)
            run.folder = path
            if not quiet:
                resumed = f", resumed after step {max(steps, 0)}" if resume else ""
                say(f"{printable(os.path.relpath(path))}: {task.num_parameters:,} parameters{resumed}")
        threads = torch.get_num_threads()
        use_threads(cli.run_config.threads, task.num_parameters)
        try:
            # an absolute path, because "last", "best" and "hpc" are keywords for the Trainer
            trainer.fit(task, data, ckpt_path=os.path.abspath(continued.path) if continued else None, weights_only=True)
            if trainer.global_step == (continued.step if continued and not resume else 0):
                limits = "--max_epochs, --max_steps, --max_time and --limit_train_batches"
                raise UserError(f"nothing was trained: check {limits}, which include the training of a checkpoint")
            if run.signal:
                raise SIGTERMException
            saved = Checkpoint(best.best_model_path) if best and best.best_model_path else None
            metrics = dict(saved.saved["metrics"]) if saved else {}
            if test and "test" in data.splits and not run.diverged:
                if saved:
                    saved.load_weights(task)
                trainer.loggers, loggers = [], trainer.loggers  # `save_results` logs the scores
                for scores in trainer.test(task, data, verbose=False):  # none with --limit_test_batches 0
                    metrics |= scores
                trainer.loggers = loggers
            if not trainer.is_global_zero:
                return Result()
            task.metric_notes |= data.notes | _notes(cli, trainer, ["train", *metrics]) | warmup_note(task)
            summary = results.summary(cli, run, metrics, saved)
            results.save_results(cli, summary, run, started, trainer, path if writes else None)
            return Result(summary, run.rows, path if writes else None, Path(saved.path) if saved else None)
        except SIGTERMException:
            remedy = f"resume with --resume {quote(os.path.relpath(path))}" if best else "nothing was saved"
            say(f"stopped at step {trainer.global_step}: {remedy}")
            sys.exit(128 + (run.signal or signal.SIGTERM))
        finally:
            torch.set_num_threads(threads)


def validate(cli: KvtCLI) -> None:
    """Measure the run's checkpoint on the validation data, and print the metrics."""
    _load(cli, "validate")[1].validate(cli.model, cli.datamodule)


def test(cli: KvtCLI) -> None:
    """Measure the run's checkpoint on the test data, and print the metrics."""
    _load(cli, "test")[1].test(cli.model, cli.datamodule)


def predict(cli: KvtCLI) -> Path | None:
    """Write predictions of the run's checkpoint to a CSV, and return the path of the CSV.

    The CSV is predictions.csv in the folder of the run or of `save_pretrained`. For any other checkpoint, the CSV is
    predictions-<stem>.csv beside the checkpoint.
    """
    # one process, so that the CSV has all predictions in order
    checkpoint, trainer = _load(cli, "predict", devices=1, num_nodes=1, strategy="auto")
    place = Path(checkpoint.path).resolve()
    folder = run_of_checkpoint(place) or (place if place.is_dir() else None)
    path = folder / "predictions.csv" if folder else place.with_name(f"predictions-{place.stem}.csv")
    require_folder(path.parent, "--ckpt_path")
    batches: Any = trainer.predict(cli.model, cli.datamodule)
    if not batches:
        raise UserError("nothing to predict: check --limit_predict_batches")
    if cli.run_config.trainer.get("fast_dev_run"):
        return None
    results.write_predictions(path, batches, cli.datamodule.names(cli.datamodule.predicted))
    return path


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing. Lightning's profiler creates a generator in each of about 150 calls a step."""

    nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.nothing


def make_trainer(cli: KvtCLI, callbacks: Sequence[L.Callback] = (), **changes: Any) -> L.Trainer:
    """Return the Trainer of a run, without loggers. `changes` replace settings of the configuration.

    kvt passes all settings to the Trainer, because the Trainer reads missing settings from environment variables such
    as PL_TRAINER_PRECISION. `callbacks` come after those of the configuration.
    """
    settings = {**cli.config_init.trainer, "logger": False, **changes}
    settings["profiler"] = settings.get("profiler") or NoProfiler()
    own = settings.pop("callbacks", None) or []
    asked = [*(own if isinstance(own, list) else [own]), *callbacks]
    if (limit := settings.pop("max_time", None)) is not None:
        asked.insert(0, theirs.Timer(limit))  # before `RunCallback`, which validates at the end
    has_bar = any(isinstance(one, theirs.ProgressBar) for one in asked)
    if settings.get("enable_progress_bar") is not False and not has_bar:
        asked.append(ProgressBar(refresh_rate=20))
    if SLURMEnvironment.detect() and not settings.get("plugins"):  # kvt's runs resume by --resume alone
        settings["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    try:
        trainer = L.Trainer(**settings, callbacks=asked)
    except (MisconfigurationException, ArithmeticError, ImportError, TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"--trainer: {error}") from error
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a user's plugin may set another IO
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return trainer


def make_loggers(cli: KvtCLI, folder: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        cli: the parsed settings.
        folder: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: the first step that a resumed run logs again. From this step on, TensorBoard hides the events that
            the run logged before. None: the run is new.
    """
    made: list[Logger] = []
    asked = cli.config_init.trainer["logger"]
    for one in asked if isinstance(asked, list) else [asked]:
        if one in ("tensorboard", True, None):  # the folder of this logger is save_dir / name / version
            how: dict[str, Any] = {"default_hp_metric": False, "purge_step": purge_step}
            made.append(TensorBoardLogger(folder.parent, "", folder.name, **how))
        elif one == "csv":
            made.append(CSVLogger(folder, name="", version=""))
        elif isinstance(one, Logger):
            made.append(one)
            one.log_hyperparams(results.hyperparameters(cli))
    return made


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: create a run's folder if it does not exist, and lock it.

    A process may lock a folder several times. Raises `Timeout` while another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK, timeout=0, is_singleton=True, thread_local=False):
        yield


def new_folder(parent: Path) -> Path:
    """Make the folder parent/version_N with the next free N. Two runs that start at once get different folders."""
    taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
    number = max(taken, default=-1) + 1
    while True:
        with suppress(FileExistsError):  # another run may have just made this folder
            (path := parent / f"version_{number}").mkdir(parents=True)
            return path
        number += 1


def read_data(data: TaskData, stage: str) -> None:
    """Download or decode the data if necessary, and read them."""
    data.prepare_data()
    data.setup(stage)


def _place(cli: KvtCLI, folder: str | Path | None, resume: bool) -> Path:
    """Return the path of a run's folder; if `folder` is None, of the parent of the new folder."""
    if folder is None:
        root = user_path(cli.run_config.trainer.get("default_root_dir") or ".").resolve() / "lightning_logs"
        path = root / cli.datamodule.task_name / cli.model.attn.rpartition(".")[2]
    elif ((path := user_path(folder).resolve()) / "config.yaml").exists() and not resume:
        raise UserError(f"{path} has a run: choose another folder, or resume it")
    require_folder(path, "run" if folder else "--default_root_dir")
    return path


def _start(cli: KvtCLI, path: Path, resume: bool) -> Checkpoint | None:
    """Read the data, and return the checkpoint to start training from; raise UserError if it does not fit the run."""
    task, data, last = cli.model, cli.datamodule, path / LAST
    read_data(data, "fit")
    start = Checkpoint(last, flag="--resume") if resume and last.is_file() else cli.start
    if start:
        if start.continues:  # the state of the optimiser would win over a changed setting
            start.require_same(cli.run_config.as_dict(), ("model", "optimizer"))
        start.require_same_data(data, content=start.continues)
        if not start.continues:
            start.load_weights(task)
    return start


def _prepare(cli: KvtCLI, trainer: L.Trainer) -> None:
    """Convert and compile the model; raise UserError if settings do not fit the data, before processes are started."""
    task, data = cli.model, cli.datamodule
    # The Trainer converts a model to the Trainer's precision only after it has copied the weights for averaging and
    # loaded a checkpoint, so kvt converts earlier. kvt does not convert to half precision here: averages and
    # checkpoints stay float32, which represents half-precision numbers exactly.
    if not isinstance(trainer.precision_plugin, HalfPrecision):
        trainer.precision_plugin.convert_module(task)
    data.batches("val", trainer)
    loader = data.batches("train", trainer)
    interval, each_epoch = trainer.val_check_interval, trainer.check_val_every_n_epoch is not None
    if isinstance(interval, int) and interval > len(loader) and each_epoch:
        raise UserError(f"--val_check_interval {interval}: an epoch has only {len(loader)} batches")
    if cli.run_config.compile:
        if loader.ragged:
            raise UserError(f"--compile: batches of {data.task_name} differ in length: drop the flag")
        compile_model(task, trainer.strategy.root_device)


def _load(cli: KvtCLI, stage: str, **settings: Any) -> tuple[Checkpoint, L.Trainer]:
    """Read the data, load the weights of the run's checkpoint into the task, and return checkpoint and Trainer."""
    if cli.start is None:
        raise UserError(f"{stage} needs --ckpt_path, a file under a run's checkpoints/")
    checkpoint, data = cli.start, cli.datamodule
    use_threads(cli.run_config.threads, cli.model.num_parameters)
    trainer = make_trainer(cli, default_root_dir=str(Path(checkpoint.path).resolve().parent), **settings)
    data.trained_on = checkpoint.trained_on
    checkpoint.require_same(
        cli.run_config.as_dict(), ("model", "data"), (*data.path_settings, *data.measured, "batch_size")
    )
    read_data(data, stage)
    checkpoint.require_same_data(data, content=stage == "validate")
    if trainer.is_global_zero and data.are_others:
        print(printable(f"note: these are not the data of the run that made {checkpoint.path}"), file=sys.stderr)
    trainer.precision_plugin.convert_module(cli.model)  # before the weights are loaded; the Trainer would convert after
    checkpoint.load_weights(cli.model)
    return checkpoint, trainer


def _notes(cli: KvtCLI, trainer: L.Trainer, metrics: Iterable[str]) -> dict[str, str]:
    """Return notes, by setting, about limits and early stopping that affect these metrics."""
    notes, splits = {}, {name.partition("/")[0] for name in metrics}
    for split in splits & {"train", "val", "test"}:
        limit = getattr(trainer, name := f"limit_{split}_batches")
        if limit < (1 if isinstance(limit, float) else len(cli.datamodule.batches(split, trainer))):
            notes[name] = f"{limit}: not all of the data"
    if (batches := trainer.overfit_batches) and "val" in splits:  # type: ignore[attr-defined]
        notes["overfit_batches"] = f"{batches}: validated on the batches of training"
    reasons = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    return notes | ({"stopped": " ".join(filter(None, reasons))} if any(reasons) else {})


def compile_model(task: Task, device: torch.device) -> None:
    """Compile a task's model with torch.compile in place; the names of parameters stay the same. GPUs use CUDA graphs.

    The stacks of blocks are compiled, too, because some losses call the stacks without `forward` of the model.
    """
    for module in (task.model, *stacks_of(task.model)):
        module.compile(mode="reduce-overhead" if device.type == "cuda" else "default")
