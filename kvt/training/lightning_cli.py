"""The command line: `kvt fit|validate|test|predict`, and the experiment scripts, which are `fit` and then one test.

Both are one Lightning CLI. Any setting of a task's model or data, and any of the Trainer's, may be given by its bare
name: `--attn kv` is `--model.attn kv`, `--batch_size 64` is `--data.batch_size 64`, `--max_epochs 2` is
`--trainer.max_epochs 2`, and `--seed 1` is `--seed_everything 1`.
"""

import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Timer, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from kvt.system.console import one_line
from kvt.system.errors import UserError, resource_limit_message
from kvt.system.files import require_folder
from kvt.system.hardware import tune
from kvt.system.signatures import argument_types
from kvt.tasks import Task, TaskData
from kvt.training import results
from kvt.training.callbacks import AttentionMaps, FinalValidation, Samples, Throughput
from kvt.training.checkpointing import AtomicCheckpointIO, BestCheckpoint, Configuration, LastCheckpoint
from kvt.training.flags import (
    SettingErrors,
    expand,
    given_settings,
    import_named,
    require_rendezvous,
    require_settings,
    take_checkpoint,
)
from kvt.training.load_checkpoint import TRAINER, Checkpoint, read_checkpoint
from kvt.training.recording import TrainingSummary, record
from kvt.training.restoring import Restoring, require_progress
from kvt.training.resume import take_resumed
from kvt.training.run_dir import OUTPUTS, RunLogger, log_dir, run_of_checkpoint
from kvt.training.stopping import Stop

COMPILE_HELP = """whether torch compiles the model first: a minute's wait, then fewer launches a step, on a GPU a few
(CUDA graphs); not for translation, nor in a fleet"""
LOST = "Connection (closed|reset) by peer|remote process exited"
"""What gloo and NCCL say where another process of the run is gone."""


class Parser(SettingErrors, LightningArgumentParser):
    """The parser of the Lightning CLI: flags in full, mistakes in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)


class CLI(LightningCLI):
    """The Lightning CLI with this project's defaults: logger, callbacks, seed, checks before anything is written.

    Args:
        argv: the words after the program's name.
        test: whether `fit` ends with a test of its best checkpoint.
    """

    def __init__(self, argv: Sequence[str], test: bool = False) -> None:
        self.resumed, argv = take_resumed(argv)
        self.source, self.argv = take_checkpoint(argv)  # what says all of the run, where no configuration does
        self.test_after_fit = test
        import_named(self.argv)
        self.words = expand(self.argv)
        self.given = given_settings(self.words)
        self._blamed = self.source.blamed if self.source else nullcontext
        tune()
        self.throughput, self.stop = Throughput(), Stop()
        self.best: BestCheckpoint | None = None
        with self.source.reading("data.data_dir" in self.given) if self.source else nullcontext():
            super().__init__(
                Task,
                TaskData,
                subclass_mode_model=True,
                subclass_mode_data=True,
                parser_class=Parser,
                save_config_callback=None,  # `Configuration` does it
                seed_everything_default=0,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
                trainer_defaults={"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20},
            )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the arguments of Trainer, model and data.

        A parser imports and calls what values name. Where a checkpoint says all of a run, only the user's words come to
        it, and it makes plain values of them: the checkpoint's own are no parser's.
        """
        if self.source is None:
            super().add_core_arguments_to_parser(parser)
            return
        parser.add_lightning_class_args(L.Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        for section, cls in {"model": self.source.task_class, "data": self.source.data_class}.items():
            for name, kind in argument_types(cls).items():
                if name not in ("spec", "seed"):
                    parser.add_argument(f"--{section}.{name}", type=kind)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed for everything, and the model told what it must know of the data."""
        parser.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
        if self.source is not None:
            return
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.link_arguments("data", "model.init_args.spec", compute_fn=attrgetter("spec"), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the words, bare flags written in full, and checks what the parser cannot."""
        self.config = parser.parse_args(self.words)
        settings = self.config[self.config["subcommand"]]
        if self.source:
            self.config_init = parser.instantiate_classes(self.config)
            self.source.fill(settings, self.given)
            for name in TRAINER:
                self.config_init[self.config["subcommand"]]["trainer"][name] = settings.trainer[name]
        with self._blamed():
            require_settings(settings.as_dict())
        if self.resumed:
            self.resumed.require_same(settings.as_dict(), parser.parse_args(expand(self.resumed.words)).fit.as_dict())
            if self.resumed.finished:
                print(f"{os.path.relpath(self.resumed.folder)} has finished: its result.json says how")
                sys.exit(0)

    def instantiate_classes(self) -> None:
        """Makes data, model and Trainer."""
        if self.source is None:
            super().instantiate_classes()
            return
        settings = self.config[self.subcommand]
        with self._blamed():
            self.datamodule = self.source.data_class(**settings.data.init_args)
            self.model = self.source.task_class(spec=self.datamodule.spec, **settings.model.init_args)
        self.trainer = self.instantiate_trainer()

    def _parse_ckpt_path(self) -> None:
        """Leaves the configuration as it was given: a checkpoint that does not fit it is refused."""

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the user names, read once."""
        return self.source or (Checkpoint(self.ckpt_path) if self.ckpt_path else None)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the user names."""
        path: str | None = self._get(self.config, "ckpt_path")
        return path

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A Trainer whose runs land in lightning_logs/<task>/<attn>/version_N and keep best and last checkpoint."""
        config = self._get(self.config_init, "trainer")
        callbacks: list[Callback] = []
        if self.subcommand == "fit":
            callbacks += self._callbacks_of_fit(config)
            if config["logger"] in (None, True):
                kwargs["logger"] = self._logger(Path(config["default_root_dir"] or ".").resolve() / "lightning_logs")
        elif config["logger"] is None:
            kwargs["logger"] = False
        if config["enable_progress_bar"] is not False:  # behind `FinalValidation`, which it shows, too
            callbacks.append(TQDMProgressBar(refresh_rate=20))
        if self.subcommand == "predict":  # one process, so that one file holds all predictions in order
            kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        self.trainer_defaults["callbacks"] = callbacks
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ImportError, TypeError, ValueError) as error:
            raise UserError(f"--trainer: {error}") from error
        require_rendezvous(trainer)
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            raise UserError(f"--strategy {config['strategy']}: its processes hand back no results: choose ddp")
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # the user's plugins say nothing else
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def _callbacks_of_fit(self, config: Mapping[str, Any]) -> list[Callback]:
        callbacks: list[Callback] = [
            self.throughput,
            FinalValidation(),
            AttentionMaps(),
            Samples(),
            Configuration(self._yaml, {name: config[name] for name in TRAINER}),
            self.stop,
            *([Restoring(self.ckpt_path)] if self.ckpt_path else []),
        ]
        if config["enable_checkpointing"] is not False and not config["fast_dev_run"]:
            self.best = BestCheckpoint(self.model.monitor, self.model.mode)
            callbacks += [self.best, LastCheckpoint(validates=config["limit_val_batches"] != 0)]
        return callbacks

    @property
    def _yaml(self) -> str:
        """The run's configuration as YAML."""
        if self.source is None:
            return str(self._parser("fit").dump(self.config["fit"], skip_none=False))
        settings = self._settings  # plain data, which the parser need not see
        del settings["data"]["init_args"]["seed"]
        return yaml.safe_dump(settings, sort_keys=False)

    def _logger(self, root: Path) -> RunLogger:
        if self.resumed:
            return self.resumed.logger()
        task, attn = self.datamodule.task_name, self.model.hparams["attn"].rpartition(".")[2]
        run = run_of_checkpoint(self.ckpt_path) if self.ckpt_path else None
        if run is None or run.parts[-3:-1] != (task, attn):
            return RunLogger(root / task / attn)
        return RunLogger(run.parent, run.name)

    def before_fit(self) -> None:
        """Finds what may be wrong with checkpoint and data before anything is written."""
        self._started = datetime.now(UTC)
        settings = self.config["fit"]["trainer"]
        for name in ("max_epochs", "max_steps", "max_time"):
            end = settings[name]
            if end == 0 or (name == "max_time" and end and (Timer(end).time_remaining() or 0) <= 0):
                raise UserError(f"--{name} {end}: nothing would be trained: choose more, or leave it out")
        logger = self.trainer.logger
        if run := logger.folder if isinstance(logger, RunLogger) else log_dir(self.trainer):
            require_folder(Path(run), "run", files=OUTPUTS)
        if self.checkpoint:
            self.checkpoint.require_same_run(self.model, self.datamodule)
        self.datamodule.trainer = self.trainer
        with self._blamed():
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
        self.datamodule.val_dataloader()
        loader = self.datamodule.train_dataloader()
        batches = len(loader)
        limit = self.trainer.limit_train_batches
        if not (limit if isinstance(limit, int) else int(limit * batches)):
            raise UserError(f"--limit_train_batches {limit}: of {batches} batches none is left to train on")
        interval = settings["val_check_interval"]
        by_epoch = settings["check_val_every_n_epoch"] is not None
        if by_epoch and isinstance(interval, int) and interval > batches:
            raise UserError(f"--val_check_interval {interval}: an epoch has {batches} batches only")
        if self.checkpoint:
            require_progress(self.checkpoint, self.trainer, self.model, self.datamodule)
        if self.config["fit"]["compile"]:
            if loader.ragged:
                raise UserError(f"--compile: the batches of {self.datamodule.task_name} differ in length: leave it out")
            compile_model(self.model, self.trainer.strategy.root_device)

    def fit(self, **kwargs: Any) -> None:
        """Trains. A run that fails before its first step leaves no folder; one asked to stop says how to go on.

        Raises:
            SystemExit: it was asked to stop: 128 and the signal that asked.
        """
        if self.trainer.world_size > 1:
            self.stop.launch()
        try:
            with self._within_limits():
                self.trainer.fit(**kwargs)
        except SIGTERMException:
            self._end_stopped()
        except BaseException as error:
            if not self.throughput.running and isinstance(self.trainer.logger, RunLogger):
                self.trainer.logger.discard()
            if isinstance(error, MisconfigurationException):
                raise UserError(f"--trainer: {error}") from error
            if type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc"):
                reason = str(error).strip().partition("\n")[0]
                raise UserError(f"--compile: torch cannot compile this model here, leave it out ({reason})") from error
            raise
        if self.stop.asked:
            self._end_stopped()

    @contextmanager
    def _within_limits(self) -> Iterator[None]:
        """A block that writes, maybe in several processes: where the machine fails it, the error says how to go on."""
        try:
            yield
        except Exception as error:
            logger = self.trainer.logger
            run = os.path.relpath(logger.log_dir) if isinstance(logger, RunLogger) else ""
            limit = resource_limit_message(error, run)
            if limit is None and self.trainer.world_size > 1 and re.search(LOST, str(error)):
                limit = "another process of this run has died: see whether the machine has memory for all"
            if limit is None:
                raise
            remedy = f"; then --resume {run} goes on" if run and self.throughput.running else ""
            raise UserError(f"{limit}{remedy}") from error

    def _end_stopped(self) -> NoReturn:
        if self.trainer.is_global_zero:
            run = log_dir(self.trainer) if self.best else None
            remedy = f"--resume {os.path.relpath(run)} goes on" if run else "nothing is saved"
            print(one_line(f"stopped at step {self.trainer.global_step}: {remedy}"), file=sys.stderr)
        sys.exit(128 + (self.stop.asked or signal.SIGTERM))

    def _require_checkpoint(self) -> None:
        if not self.checkpoint:
            raise UserError(f"{self.subcommand} needs --ckpt_path, a file under a run's checkpoints/")
        self.checkpoint.require_same_model(self.model)
        self.checkpoint.load_weights(self.model)
        with self._blamed():
            self.datamodule.prepare_data()
            self.datamodule.setup(self.subcommand)
        self.config_init[self.subcommand]["ckpt_path"] = None  # the Trainer would take more of it than the weights

    before_validate = before_test = _require_checkpoint

    def before_predict(self) -> None:
        """Checks that predictions.csv can be written, then loads the checkpoint."""
        if self.ckpt_path and not self.config["predict"]["trainer"]["fast_dev_run"]:
            require_folder(self._predictions.parent, "--ckpt_path", files=[self._predictions.name])
        self._require_checkpoint()

    @property
    def _predictions(self) -> Path:
        """The path of predictions.csv: in the run's folder, or beside a checkpoint that lies in no run's folder."""
        checkpoint = Path(self.ckpt_path or "")
        return (run_of_checkpoint(checkpoint) or checkpoint.resolve().parent) / "predictions.csv"

    def after_fit(self) -> None:
        """Tests the best checkpoint, if asked to; then records and prints the result."""
        with self._within_limits():
            rows = self._conclude()
        if isinstance(self.trainer.logger, RunLogger):
            self.trainer.logger.release()
        if self.trainer.is_global_zero:
            self.show(rows)

    def _conclude(self) -> dict[str, Any]:
        best = self.best.best_model_path if self.best else ""
        if best and not Path(best).is_file():
            raise UserError(f"{best} is gone: there is nothing to test any more")
        metrics: dict[str, float] = read_checkpoint(best)["metrics"] if best else {}
        outcome = TrainingSummary(self._started, metrics, self.speed, self.model.history, self.model.diverged)
        if self.test_after_fit and "test" in self.datamodule.splits and not outcome.diverged:
            outcome.metrics.update(self._test(best))
        if not self.trainer.is_global_zero:
            return {}
        run = None if self.config["fit"]["trainer"]["fast_dev_run"] else log_dir(self.trainer)
        return record(outcome, self.model, self.datamodule, self.trainer, self._settings, run)

    def _test(self, best: str) -> Mapping[str, float]:
        """What a test of the best checkpoint, or else of the last weights, says.

        It restores callbacks and history as they were at that checkpoint.
        """
        tested = self.trainer.test(self.model, self.datamodule, ckpt_path=best or None, verbose=False)
        return tested[0] if tested else {}

    @property
    def speed(self) -> dict[str, float]:
        """The seconds of training, and predictions a second."""
        return {"seconds": self.throughput.seconds, f"{self.model.unit}_per_second": self.throughput.rate}

    def show(self, rows: Mapping[str, Any]) -> None:
        """Prints a result."""
        print(f"\n{results.table(rows)}")

    @property
    def _settings(self) -> dict[str, Any]:
        """The configuration, but for how this process came by it: a resumed run has that of one that never stopped."""
        settings: dict[str, Any] = self.config["fit"].as_dict()
        del settings["config"]
        return settings | ({"ckpt_path": None} if self.resumed else {})

    def after_predict(self) -> None:
        """Writes predictions.csv."""
        batches = self.trainer.predict_loop.predictions
        if not batches:
            raise UserError("predict: no batch to predict, see --limit_predict_batches")
        if not self.config["predict"]["trainer"]["fast_dev_run"]:
            results.write_predictions(self._predictions, batches)
            print(f"predictions in {os.path.relpath(self._predictions)}")


def compile_model(task: Task, device: torch.device) -> None:
    """Lets torch compile a task's model in place, so that its parts keep their names.

    On a GPU it then replays CUDA graphs, one launch for all the kernels of a pass.
    """
    torch._logging.set_logs(inductor=logging.ERROR)  # what goes wrong is said once, by us
    task.model.compile(mode="reduce-overhead" if device.type == "cuda" else "default")
