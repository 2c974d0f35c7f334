"""Trains, validates, tests or predicts with the Lightning Trainer. On a CPU, resuming a run changes no result."""

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

import lightning as L
import torch
import yaml
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
from kvt.run.callbacks import AtomicCheckpointIO, Best, Last, Lines, Row, RunCallback
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig
from kvt.run.folder import LAST, locked, run_of_checkpoint
from kvt.run.load_checkpoint import Checkpoint
from kvt.system import UserError, atomically, say, silence_libraries, table, user_path
from kvt.tasks import Task, TaskData
from kvt.tasks.schedules import warmup_note
from kvt.tune import use_threads
from kvt.view.pictures import Shown


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run; empty in every process but the first.

    Attributes:
        metrics: the first entries of result.json: task, attn, seed, "val/acc", "test/acc", parameters, seconds …
        history: a row for each step with logged metrics.
        folder: the folder with config.yaml, result.json, history.csv and checkpoints; None with --fast_dev_run.
        checkpoint: path of the best checkpoint by the task's `monitor`; None if the run saved no best checkpoint.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    history: list[Row] = field(default_factory=list)
    folder: Path | None = None
    checkpoint: Path | None = None

    def __repr__(self) -> str:
        return table(self.metrics | ({} if self.folder is None else {"run": os.path.relpath(self.folder)}))


def train(
    config: RunConfig | KvtCLI,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    test: bool = True,
    callbacks: Sequence[L.Callback] = (),
    quiet: bool = False,
) -> Result:
    """Train, test the best checkpoint, and return the result.

    If a signal stops the run, print how to resume it or that nothing was saved, and exit with 128 + the signal number.

    Args:
        config: the run's configuration, or a parsed command line.
        folder: folder for the run's files; default: a new lightning_logs/<task>/<attn>/version_N.
        resume: whether to continue from an existing checkpoints/last.ckpt in the folder, as if the run had not stopped.
        test: whether to test the best checkpoint, or the final weights if there is none. A run that has diverged, or
            whose data have no test split, is not tested.
        callbacks: further Lightning callbacks.
        quiet: if true, draw no pictures, do not print the folder, and do not silence Lightning's messages.

    Raises:
        UserError: a setting is wrong, the data are missing or unfit, or the folder cannot be used.
        filelock.Timeout: another process uses the folder.
    """
    if not quiet:
        silence_libraries()
    cli = config if isinstance(config, KvtCLI) else KvtCLI(config.as_dict())
    started, task, data, settings = datetime.now(UTC), cli.model, cli.datamodule, cli.content["trainer"]
    is_first = getattr(rank_zero_only, "rank", 0) == 0
    writes = is_first and not settings["fast_dev_run"]
    data.prepare_data()
    data.setup("fit")
    last = user_path(folder) / LAST if folder and resume else None
    start = Checkpoint(last) if last and last.is_file() else cli.start
    continued = start if start and _continues(cli, start) else None
    steps = continued.saved["global_step"] if continued else -1
    path = make_folder(cli, folder, resume, writes)
    with locked(path) if writes else nullcontext():
        run, best = RunCallback(resume), None
        added: list[L.Callback] = [run] if quiet else [run, Shown()]
        if settings["enable_checkpointing"] is not False and not settings["fast_dev_run"]:
            place, how = str((path / LAST).parent), dict[str, Any](enable_version_counter=False)
            mode = "max" if task.monitored().better == "more" else "min"
            best = Best(place, "best", monitor=task.monitor, mode=mode, save_on_train_epoch_end=False, **how)
            best.run = run
            each_epoch = settings["limit_val_batches"] == 0  # a run without validation saves after every epoch
            added += [best, Last(place, "last", save_on_exception=True, save_on_train_epoch_end=each_epoch, **how)]
        purge_step = steps + 1 if resume else None
        trainer = make_trainer(cli, [*callbacks, *added], path, path if writes else None, purge_step)
        # The Trainer converts a model to its precision only after `WeightAveraging` has copied the weights and after a
        # checkpoint has been loaded. kvt converts the model before both, so that float64 weights are not rounded. Half
        # precision does not need this: float32 weights represent half-precision numbers exactly.
        if not isinstance(trainer.precision_plugin, HalfPrecision):
            trainer.precision_plugin.convert_module(task)
        if cli.content["compile"]:
            compile_model(task, data, trainer)
        if writes:
            for leftover in path.rglob("*.tmp"):  # files of a killed process
                leftover.unlink()
            if not (path / "config.yaml").exists():
                with atomically(path / "config.yaml") as part:
                    part.write_text(yaml.safe_dump(cli.content, sort_keys=False), encoding="utf-8")
            run.folder = path
            if not quiet:
                resumed = f", resumed after step {max(steps, 0)}" if resume else ""
                print(f"{os.path.relpath(path)}: {task.num_parameters:,} parameters{resumed}", file=sys.stderr)
        threads = torch.get_num_threads()
        use_threads(cli.content["threads"], task.num_parameters)
        try:
            # an absolute path, because "last", "best" and "hpc" are keywords for the Trainer
            trainer.fit(task, data, ckpt_path=os.path.abspath(continued.path) if continued else None, weights_only=True)
            # a run that was stopped after its last step trains no step when it resumes, but makes its result
            if trainer.global_step == (steps if continued and not resume else 0):
                limits = "--max_epochs, --max_steps, --max_time and --limit_train_batches"
                raise UserError(f"nothing was trained: check {limits}, which include the training of a checkpoint")
            if run.received:  # the signal came in the last step: a resumed run will make the result
                raise SIGTERMException
            return _result(cli, trainer, run, best, started, test)
        except SIGTERMException:
            remedy = f"resume with --resume {quote(os.path.relpath(path))}" if best else "nothing was saved"
            say(f"stopped at step {trainer.global_step}: {remedy}")
            sys.exit(128 + (run.received or signal.SIGTERM))
        finally:
            torch.set_num_threads(threads)


def _result(
    cli: KvtCLI, trainer: L.Trainer, run: RunCallback, best: Best | None, started: datetime, test: bool
) -> Result:
    """Test a run that has ended, and write its result. Return the result."""
    task, data = cli.model, cli.datamodule
    saved = Checkpoint(best.best_model_path) if best and best.best_model_path else None
    metrics = dict(saved.saved["metrics"]) if saved else {}
    if test and "test" in data.splits and not run.diverged:
        if saved:
            saved.load_weights(task)
        trainer.loggers, loggers = [], trainer.loggers  # not the test, but `save_results` logs the scores
        for scores in trainer.test(task, data, verbose=False):  # none with --limit_test_batches 0
            metrics |= scores
        trainer.loggers = loggers
    if not trainer.is_global_zero:
        return Result()
    task.metric_notes |= data.notes | _notes(cli, trainer, ["train", *metrics]) | warmup_note(task)
    summary = results.save_results(cli, run, metrics, saved, started, trainer)
    return Result(summary, run.rows, run.folder, Path(saved.path) if saved else None)


def validate(cli: KvtCLI) -> None:
    """Measure the checkpoint `cli.start` on the validation data, and print the metrics."""
    _load(cli, "validate")[1].validate(cli.model, cli.datamodule)


def test(cli: KvtCLI) -> None:
    """Measure the checkpoint `cli.start` on the test data, and print the metrics."""
    _load(cli, "test")[1].test(cli.model, cli.datamodule)


def predict(cli: KvtCLI) -> Path | None:
    """Write predictions of `cli.start` to a CSV; return its path. With --fast_dev_run, write nothing and return None.

    The CSV is predictions.csv in the run's folder, or in a folder that `save_pretrained` has written. For any other
    checkpoint, the CSV is predictions-<stem>.csv beside the checkpoint.
    """
    # one process, so that the CSV has all predictions in order
    checkpoint, trainer = _load(cli, "predict", devices=1, num_nodes=1, strategy="auto")
    place = Path(checkpoint.path).resolve()
    folder = run_of_checkpoint(place) or (place if place.is_dir() else None)
    path = folder / "predictions.csv" if folder else place.with_name(f"predictions-{place.stem}.csv")
    batches: Any = trainer.predict(cli.model, cli.datamodule)
    if not batches:
        raise UserError("nothing to predict: check --limit_predict_batches")
    if cli.content["trainer"]["fast_dev_run"]:
        return None
    results.write_predictions(path, batches, cli.datamodule.names(cli.datamodule.predicted))
    return path


class NoProfiler(PassThroughProfiler):
    """A profiler that does nothing. Its base class also does nothing, but creates about 150 generators in each step."""

    nothing = nullcontext()

    def profile(self, action_name: str) -> Any:
        return self.nothing


def make_trainer(
    cli: KvtCLI,
    callbacks: Sequence[L.Callback] = (),
    root: Path = Path(),
    folder: Any = None,
    purge_step: int | None = None,
    **changes: Any,
) -> L.Trainer:
    """Return the Trainer of a run.

    kvt passes every argument, because the Trainer reads missing ones from environment variables such as
    PL_TRAINER_PRECISION. Raises UserError if the Trainer rejects a setting.

    Args:
        cli: the parsed settings.
        callbacks: callbacks to add after those of the configuration.
        root: the Trainer's `default_root_dir`.
        folder: the run's folder, into which the TensorBoard and CSV loggers write; None: no loggers.
        purge_step: the first step that a resumed run logs again. From this step on, TensorBoard hides the events that
            the run logged before. None: the run is new.
        changes: settings that replace those of the configuration.
    """
    loggers: list[Logger] = []
    named = [] if folder is None else cli.config_init.trainer["logger"]
    for one in named if isinstance(named, list) else [named]:
        if one in ("tensorboard", True, None):  # this logger writes to save_dir / name / version
            how: dict[str, Any] = {"default_hp_metric": False, "purge_step": purge_step}
            loggers.append(TensorBoardLogger(folder.parent, "", folder.name, **how))
        elif one == "csv":
            loggers.append(CSVLogger(folder, name="", version=""))
        elif isinstance(one, Logger):
            loggers.append(one)
            one.log_hyperparams(results.hyperparameters(cli))
    settings = {**cli.config_init.trainer, "logger": loggers, "default_root_dir": str(root), **changes}
    settings["profiler"] = settings["profiler"] or NoProfiler()
    own, limit = settings["callbacks"] or [], settings["max_time"]
    settings["max_time"] = None
    # the timer comes before `RunCallback`, which adds a final validation if the timer has stopped the run
    asked = [*([] if limit is None else [theirs.Timer(limit)]), *(own if isinstance(own, list) else [own]), *callbacks]
    if settings["enable_progress_bar"] is not False and not any(isinstance(one, theirs.ProgressBar) for one in asked):
        settings["enable_progress_bar"] = bool(sys.stdout and sys.stdout.isatty())
        asked.append(Lines())
        if settings["enable_progress_bar"]:
            asked.append(theirs.TQDMProgressBar(refresh_rate=20))
    if SLURMEnvironment.detect() and not settings["plugins"]:  # no requeueing: runs resume by --resume alone
        settings["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    try:
        trainer = L.Trainer(**{**settings, "callbacks": asked})
    except (MisconfigurationException, ArithmeticError, ImportError, TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"--trainer: {error}") from error
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # a user's plugin may set another IO
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    return trainer


def make_folder(cli: KvtCLI, folder: str | Path | None, resume: bool, writes: bool) -> Path:
    """Return the path of a run's folder; raise UserError if `folder` has a run and `resume` is False.

    If `folder` is None and `writes` is true, make and return a folder version_N with the next free N. If `folder` is
    None and `writes` is false, return the parent of such folders.
    """
    if folder is not None:
        path = user_path(folder).resolve()
        if (path / "config.yaml").exists() and not resume:
            raise UserError(f"{path} has a run: choose another folder, or resume it")
        return path
    root = user_path(cli.content["trainer"]["default_root_dir"] or ".").resolve() / "lightning_logs"
    parent = root / cli.datamodule.task_name / cli.model.attn.rpartition(".")[2]
    taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
    for number in count(max(taken, default=-1) + 1) if writes else ():
        with suppress(FileExistsError):  # another run may have just made this folder
            (path := parent / f"version_{number}").mkdir(parents=True)
            return path
    return parent


def _continues(cli: KvtCLI, start: Checkpoint) -> bool:
    """Return whether training continues from `start`; if not, load its weights into the task.

    Raises UserError if `start` does not fit the run.
    """
    if start.continues:  # the saved state of the optimiser would override a changed setting
        start.require_same(cli.content, ("model", "optimizer"))
    start.require_same_data(cli.datamodule, content=start.continues)
    if not start.continues:
        start.load_weights(cli.model)
    return start.continues


def _load(cli: KvtCLI, stage: str, **settings: Any) -> tuple[Checkpoint, L.Trainer]:
    """Set up data for `stage`, load the weights of `cli.start` into the task, and return `cli.start` and a Trainer."""
    if cli.start is None:
        raise UserError(f"{stage} needs --ckpt_path, a file under a run's checkpoints/")
    checkpoint, data = cli.start, cli.datamodule
    use_threads(cli.content["threads"], cli.model.num_parameters)
    trainer = make_trainer(cli, [], Path(checkpoint.path).resolve().parent, **settings)
    data.trained_on = checkpoint.trained_on
    checkpoint.require_same(cli.content, ("model", "data"), (*data.path_settings, *data.measured, "batch_size"))
    data.prepare_data()
    data.setup(stage)
    checkpoint.require_same_data(data, content=stage == "validate")
    if trainer.is_global_zero and data.are_others:
        print(f"note: these are not the data of the run that made {checkpoint.path}", file=sys.stderr)
    trainer.precision_plugin.convert_module(cli.model)  # before the weights are loaded; the Trainer would convert after
    checkpoint.load_weights(cli.model)
    return checkpoint, trainer


def _notes(cli: KvtCLI, trainer: L.Trainer, metrics: Iterable[str]) -> dict[str, str]:
    """Return notes on settings that limit the data of `metrics` (names such as "val/acc"), and on early stopping.

    The keys are names of settings, such as "limit_val_batches", and "stopped".
    """
    notes, splits = {}, {name.partition("/")[0] for name in metrics}
    for split in splits & {"train", "val", "test"}:
        limit = getattr(trainer, name := f"limit_{split}_batches")
        if limit < (1 if isinstance(limit, float) else len(cli.datamodule.batches(split, trainer))):
            notes[name] = f"{limit}: not all of the data"
    if (batches := trainer.overfit_batches) and "val" in splits:  # type: ignore[attr-defined]
        notes["overfit_batches"] = f"{batches}: validated on the batches of training"
    reasons = [callback.stopping_reason_message for callback in trainer.early_stopping_callbacks]
    return notes | ({"stopped": " ".join(filter(None, reasons))} if any(reasons) else {})


def compile_model(task: Task, data: TaskData, trainer: L.Trainer) -> None:
    """Compile a task's model in place with torch.compile, which uses CUDA graphs on a GPU. Parameters keep their names.

    The stacks of blocks are also compiled, because some tasks call `model.states` instead of the model's `forward`.
    Raises UserError if batches differ in length.
    """
    if data.batches("train", trainer).ragged:
        raise UserError(f"--compile: batches of {data.task_name} differ in length: drop the flag")
    on_gpu = trainer.strategy.root_device.type == "cuda"
    for module in (task.model, *stacks_of(task.model)):
        module.compile(mode="reduce-overhead" if on_gpu else "default")
