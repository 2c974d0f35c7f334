"""Builds data, task and Trainer of a run from a configuration, and trains, validates, tests or predicts."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
import yaml
from filelock import Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from kvt.models.blocks import stacks_of
from kvt.run import results
from kvt.run.callbacks import EndRun, ProgressBar
from kvt.run.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig
from kvt.run.folder import IN_USE, last_checkpoint, locked, new_folder, run_of_checkpoint
from kvt.run.lightning_internals import load_only_named_checkpoints
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.loggers import hyperparameters, make_loggers
from kvt.run.pictures import Shown
from kvt.run.recorder import Recorder, Row
from kvt.system.console import Stopped, say, silence_libraries, table
from kvt.system.errors import UserError
from kvt.system.files import read_json, require_folder, user_path, write_atomically
from kvt.system.hardware import use_threads
from kvt.system.quoting import one_line, printable, shell_word
from kvt.tasks import Task, TaskData
from kvt.tasks.schedules import warmup_note


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
    callbacks: Sequence[Callback] = (),
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
    if not isinstance(config, RunConfig):
        raise UserError(f"{config!r:.60}: expected a configuration, such as kvt.RunConfig.from_name('reverse')")
    silence_libraries()
    return fit(KvtCLI(config.as_dict()), folder, resume=resume, test=test, callbacks=callbacks)


def fit(
    cli: KvtCLI,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    test: bool = True,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Result:
    """Train data and task of `cli`, with the arguments of `train`. With `quiet`, print nothing, and draw nothing.

    If a signal stops a run, the run prints how to resume it, and exits with code 128 + the number of the signal.
    """
    started = datetime.now(UTC)
    path, start = _place(cli, folder, resume)
    goes_on = start if start and start.continues else None
    recorder, stop = Recorder(resume), EndRun()
    saving = _checkpoints(cli, recorder)
    shown = [] if quiet else [Shown(recorder)]
    # EndRun comes first: it validates after training, before averages replace weights at the end of training
    trainer = make_trainer(cli, [*callbacks, recorder, *shown, *saving], [stop])
    require_folder(path, "run" if folder else "--default_root_dir")
    _prepare(cli, trainer, start)  # mistakes of the user are reported here, before any file is written
    if trainer.world_size > 1:
        stop.launch()
    with _folder(cli, trainer, path, is_new=folder is None) as made:
        if made:
            for callback in saving:
                callback.dirpath = str(made / "checkpoints")
            steps = None if not resume else goes_on.step if goes_on else -1
            trainer.loggers = _loggers(cli, made, None if steps is None else steps + 1)
            resumed = "" if steps is None else f", resumed after step {steps}"
            if not quiet:
                say(f"{printable(os.path.relpath(made))}: {cli.model.num_parameters:,} parameters{resumed}")
        threads = torch.get_num_threads()
        try:
            use_threads(cli.run_config.threads, cli.model.num_parameters)
            # an absolute path, because "last", "best" and "hpc" are keywords for the Trainer
            last = os.path.abspath(goes_on.path) if goes_on else None
            trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=last)
            _require_trained(trainer, recorder, resume, goes_on)
            if stop.signal:
                raise SIGTERMException
            best = Checkpoint(saving[0].best_model_path) if saving and saving[0].best_model_path else None
            metrics = _measure(cli, trainer, best, test and not recorder.diverged)
            return _save(cli, trainer, recorder, made, started, metrics, best) if trainer.is_global_zero else Result()
        except SIGTERMException:
            _end_stopped(trainer, 128 + (stop.signal or signal.SIGTERM), made if saving else None)
        except Stopped as error:
            if not recorder.has_trained:
                raise
            _end_stopped(trainer, error.code, made if saving else None)
        finally:
            torch.set_num_threads(threads)


def validate(cli: KvtCLI) -> None:
    """Measure the run's checkpoint on the validation data, and print the metrics."""
    _, trainer = _load(cli, "validate")
    trainer.validate(cli.model, cli.datamodule)


def test(cli: KvtCLI) -> Path | None:
    """Measure the run's checkpoint on the test data, print the metrics, write a file, and return the file's path.

    If the checkpoint has the best weights of a finished run, and the data are the complete test split of the run, kvt
    adds the metrics to result.json, unless result.json has metrics of a part of the split. All other metrics get a
    separate file in the run's folder. For a checkpoint outside a run's folder, the function writes no file and returns
    None.
    """
    checkpoint, trainer = _load(cli, "test")
    scores = trainer.test(cli.model, cli.datamodule)
    folder = run_of_checkpoint(checkpoint.path)
    if folder is None or not scores or not trainer.is_global_zero or cli.run_config.trainer.get("fast_dev_run"):
        return None
    result, notes = read_json(folder / "result.json") or {}, cli.datamodule.notes | _notes(cli, trainer, scores[0])
    whole = not cli.datamodule.are_others and "limit_test_batches" not in notes | result.get("notes", {})
    same = {"precision": str(trainer.precision)}.items() <= result.items()
    data = {"content": cli.datamodule.content, "notes": notes, "config": cli.run_config.as_dict()}
    measured = {"checkpoint": os.path.relpath(checkpoint.path, folder), **data}
    return results.keep_test(folder, whole and same and results.is_result_of(folder, checkpoint), scores[0], measured)


def predict(cli: KvtCLI) -> Path | None:
    """Write predictions of the run's checkpoint to a CSV, and return the path of the CSV.

    The CSV is predictions.csv in the folder of the run or of `save_pretrained`. For any other checkpoint, the CSV is
    predictions-<stem>.csv beside the checkpoint.
    """
    place = Path(_measured(cli, "predict").path).resolve()
    folder = run_of_checkpoint(place) or (place if place.is_dir() else None)
    path = folder / "predictions.csv" if folder else place.with_name(f"predictions-{place.stem}.csv")
    dry = cli.run_config.trainer.get("fast_dev_run")
    if not dry:
        require_folder(path.parent, "--ckpt_path")
    # one process, so that the CSV has all predictions in order
    _, trainer = _load(cli, "predict", devices=1, num_nodes=1, strategy="auto")
    batches: Any = trainer.predict(cli.model, cli.datamodule)
    if not batches:
        raise UserError("nothing to predict: check --limit_predict_batches")
    if dry:
        return None
    results.write_predictions(path, batches, cli.datamodule.names(cli.datamodule.predicted))
    return path


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing. Lightning's profiler creates a generator in each of about 150 calls a step."""

    nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.nothing


def make_trainer(
    cli: KvtCLI, callbacks: Sequence[Callback] = (), first: Sequence[Callback] = (), **changes: Any
) -> L.Trainer:
    """Return the Trainer of a run.

    kvt passes all settings to the Trainer, because the Trainer reads missing settings from environment variables such
    as PL_TRAINER_PRECISION.

    Args:
        cli: the parsed settings.
        callbacks: callbacks that come after the callbacks of the configuration.
        first: callbacks that come before the callbacks of the configuration.
        changes: Trainer settings that replace settings of the configuration.
    """
    settings = {**cli.config_init.trainer, "logger": False, **changes}
    settings["profiler"] = settings.get("profiler") or NoProfiler()
    own = settings.pop("callbacks", None) or []
    asked = [*first, *(own if isinstance(own, list) else [own]), *callbacks]
    bars: list[Callback] = [callback for callback in asked if isinstance(callback, theirs.ProgressBar)]
    others = [callback for callback in asked if callback not in bars]
    if not bars and settings.get("enable_progress_bar") is not False:
        bars = [ProgressBar(refresh_rate=20)]
    try:
        # progress bars come after `EndRun`, so that bars show the metrics of its validation
        trainer = L.Trainer(**settings, callbacks=[*others, *bars])
    except (MisconfigurationException, ArithmeticError, ImportError, TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"--trainer: {error}") from error
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a user's plugin may set another IO
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    load_only_named_checkpoints(trainer)
    return trainer


def _checkpoints(cli: KvtCLI, recorder: Recorder) -> list[Any]:
    settings = cli.run_config.trainer
    if settings.get("enable_checkpointing") is False or settings.get("fast_dev_run"):
        return []
    return [BestCheckpoint(recorder, cli.model), LastCheckpoint(validates=settings.get("limit_val_batches") != 0)]


@contextmanager
def _folder(cli: KvtCLI, trainer: L.Trainer, path: Path, is_new: bool) -> Iterator[Path | None]:
    """Context manager: make and lock the run's folder, with config.yaml, in the first process; yield its path."""
    if not trainer.is_global_zero or cli.run_config.trainer.get("fast_dev_run"):
        yield None
        return
    made = new_folder(path) if is_new else path
    try:
        with locked(made):
            for leftover in made.rglob("*.tmp"):  # of a killed process
                leftover.unlink(missing_ok=True)
            if not (made / "config.yaml").exists():
                content = yaml.safe_dump(cli.run_config.as_dict(), sort_keys=False)
                write_atomically(made / "config.yaml", content)
            yield made
    except Timeout as error:
        raise UserError(f"{made}: {IN_USE}") from error


def _loggers(cli: KvtCLI, folder: Path, purge_step: int | None) -> list[Logger]:
    """Return the loggers of a run, with its hyperparameters."""
    made = make_loggers(cli.config_init.trainer["logger"], folder, purge_step)
    shown = hyperparameters(cli.model, cli.datamodule, cli.run_config.as_dict())
    for logger in made:
        if isinstance(logger, TensorBoardLogger):  # its table gets them with the scores at the end of the run
            logger.hparams.update(cli.run_config.trainer | shown)  # hparams.yaml
        else:
            logger.log_hyperparams(shown)
    return made


def _place(cli: KvtCLI, folder: str | Path | None, resume: bool) -> tuple[Path, Checkpoint | None]:
    """Return the path of a run's folder, or of the new folder's parent, and the checkpoint to start training from."""
    if folder is None:
        named = cli.run_config.trainer.get("default_root_dir")
        root = user_path(user_path("." if named is None else named).resolve()) / "lightning_logs"
        return root / cli.datamodule.task_name / cli.model.attn.rpartition(".")[2], cli.start
    path = user_path(folder).resolve()
    if (path / "config.yaml").exists() and not resume:
        raise UserError(f"{path} has a run: choose another folder, or resume it")
    last = last_checkpoint(path)
    return path, Checkpoint(last) if resume and last.exists() else cli.start


def _prepare(cli: KvtCLI, trainer: L.Trainer, start: Checkpoint | None) -> None:
    """Raise UserError for mistakes in settings, checkpoint and data, before files and processes are created."""
    task, data = cli.model, cli.datamodule
    if start and start.continues:  # the state of the optimiser would win over a changed setting
        start.require_same(cli.run_config.as_dict(), ("model", "optimizer"))
    read_data(data, "fit")
    if start:
        start.require_same_data(data, content=start.continues)
        if not start.continues:
            start.load_weights(task)
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


def read_data(data: TaskData, stage: str) -> None:
    """Download or decode the data if necessary, and read them."""
    data.prepare_data()
    data.setup(stage)


def _measure(cli: KvtCLI, trainer: L.Trainer, best: Checkpoint | None, test: bool) -> dict[str, float]:
    """Return validation metrics of the best checkpoint; with `test` and a test split, also the test metrics."""
    metrics = dict(best.saved["metrics"]) if best else {}
    if not test or "test" not in cli.datamodule.splits:
        return metrics
    if best:
        best.load_weights(cli.model)
    loggers, trainer.loggers = trainer.loggers, []  # no log here: `save_results` logs the scores
    scores = trainer.test(cli.model, cli.datamodule, verbose=False)  # empty with --limit_test_batches 0
    trainer.loggers = loggers
    return metrics | (dict(scores[0]) if scores else {})


def _require_trained(trainer: L.Trainer, recorder: Recorder, resume: bool, goes_on: Checkpoint | None) -> None:
    if trainer.global_step == 0 or not (recorder.has_trained or resume):
        if goes_on and goes_on.step:
            limits = "--max_epochs, --max_steps and --max_time include the checkpoint's training: raise them"
            raise UserError(f"nothing was trained: {limits}")
        limits = "--max_epochs, --max_steps, --max_time and --limit_train_batches"
        raise UserError(f"nothing was trained: check {limits}")


def _save(
    cli: KvtCLI,
    trainer: L.Trainer,
    recorder: Recorder,
    folder: Path | None,
    started: datetime,
    metrics: dict[str, float],
    best: Checkpoint | None,
) -> Result:
    """Return the result, and write it into the run's folder, if the run has a folder."""
    cli.model.metric_notes |= cli.datamodule.notes | _notes(cli, trainer, ["train", *metrics]) | warmup_note(cli.model)
    summary = results.summary(cli.model, cli.datamodule, recorder, cli.run_config.seed_everything, metrics)
    results.save_results(summary, recorder.rows, cli.run_config.as_dict(), started, trainer, folder)
    return Result(summary, recorder.rows, folder, Path(best.path) if best else None)


def _measured(cli: KvtCLI, command: str) -> Checkpoint:
    if cli.start is None:
        raise UserError(f"{command} needs --ckpt_path, a file under a run's checkpoints/")
    return cli.start


def _load(cli: KvtCLI, stage: str, **settings: Any) -> tuple[Checkpoint, L.Trainer]:
    """Read the data, load the weights of the run's checkpoint into the task, and return checkpoint and Trainer."""
    checkpoint, data = _measured(cli, stage), cli.datamodule
    use_threads(cli.run_config.threads, cli.model.num_parameters)
    trainer = make_trainer(cli, **settings)
    data.trained_on = checkpoint.trained_on
    checkpoint.require_same(cli.run_config.as_dict(), ("model", "data"), (*data.path_settings, "batch_size"))
    read_data(data, stage)
    checkpoint.require_same_data(data, content=stage == "validate" and not data.measures_others)
    if trainer.is_global_zero and data.are_others and not data.only_predict:
        what = ": all of them are measured" if data.measures_others else ""
        note = f"note: these are not the data of the run that made {checkpoint.path}{what}"
        print(printable(note), file=sys.stderr)
    trainer.precision_plugin.convert_module(cli.model)  # before the weights are loaded; the Trainer would convert after
    checkpoint.load_weights(cli.model)
    return checkpoint, trainer


def _notes(cli: KvtCLI, trainer: L.Trainer, metrics: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps settings that affect these metrics, such as limits and early stopping, to notes."""
    notes, splits = {}, {name.partition("/")[0] for name in metrics}
    for split in splits & {"train", "val", "test"}:
        limit = getattr(trainer, name := f"limit_{split}_batches")
        if limit < (1 if isinstance(limit, float) else len(cli.datamodule.batches(split, trainer))):
            notes[name] = f"{limit}: not all of the data"
    if (batches := trainer.overfit_batches) and "val" in splits:  # type: ignore[attr-defined]
        notes["overfit_batches"] = f"{batches}: validated on the batches of training"
    reasons = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    return notes | ({"stopped": " ".join(filter(None, reasons))} if any(reasons) else {})


def _end_stopped(trainer: L.Trainer, code: Any, folder: Path | None) -> NoReturn:
    if trainer.is_global_zero:
        resume = folder and f"resume with --resume {shell_word(os.path.relpath(folder))}"
        remedy = resume or "nothing was saved"
        say(one_line(f"stopped at step {trainer.global_step}: {remedy}"))
    sys.exit(code)


def compile_model(task: Task, device: torch.device) -> None:
    """Compile a task's model with torch.compile in place; the names of parameters stay the same. GPUs use CUDA graphs.

    The stacks of blocks are compiled, too, because some losses call the stacks without `forward` of the model.
    """
    for module in (task.model, *stacks_of(task.model)):
        module.compile(mode="reduce-overhead" if device.type == "cuda" else "default")
