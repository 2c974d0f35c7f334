"""One run: `kvt fit|validate|test|predict`, and the experiment scripts, which fit and then test.

Flags, YAML files and checkpoints become settings; settings become data, a task and a Trainer; the Trainer runs.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from kvt.system.console import one_line
from kvt.system.errors import UserError, argument_types, resource_limit_message
from kvt.system.files import require_folder
from kvt.system.hardware import tune
from kvt.tasks.base import Task, class_name
from kvt.training import results
from kvt.training.callbacks import (
    AttentionMaps,
    FinalValidation,
    History,
    ProgressBar,
    RunningState,
    SampleText,
    StopOnSignal,
    Throughput,
)
from kvt.training.flags import (
    FROM_ELSEWHERE,
    RUN_FLAGS,
    RunSource,
    SettingsParser,
    find_source,
    require_settings,
    split_flags,
)
from kvt.training.load_checkpoint import SECTIONS, TRAINER, Checkpoint, read_checkpoint
from kvt.training.run_dir import (
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    RunLogger,
    SaveConfig,
    log_dir,
    run_of_checkpoint,
)

COMPILE_HELP = """whether torch compiles the model first: a minute's wait, then fewer launches a step, on a GPU a few
(CUDA graphs); not for translation"""
# what gloo and NCCL report when another process of the run is gone
LOST_PROCESS = "Connection (closed|reset) by peer|remote process exited"
# settings that may be given when a run is resumed: where its data lie, what is shown
MAY_DIFFER = {"data_dir", "root", "text", "features", "weights", "enable_progress_bar"}


class CLI(LightningCLI):
    """The Lightning CLI with this project's defaults; for its arguments see `kvt.cli.experiment.run_lightning`."""

    def __init__(self, argv: Sequence[str], test: bool = False, **parser: str) -> None:
        flags, words = split_flags(argv)
        self.command, *words = words
        self.test_after_fit = test
        found = find_source(flags, self.command)
        if found is None and not {"-h", "--help"} & {*words}:
            raise UserError("--config is missing: pass a task's YAML, such as --config cifar10")
        self.source = found or RunSource()
        self._print_config = flags.print_config
        self.throughput, self.stop = Throughput(), StopOnSignal()
        self.history = History(self.throughput)
        self.best: BestCheckpoint | None = None
        tune()
        super().__init__(
            args=words,
            run=False,
            parser_class=SettingsParser,
            parser_kwargs={"prog": f"kvt {self.command}", "usage": "%(prog)s [flags]", "allow_abbrev": False, **parser},
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20},
        )
        getattr(self, self.command)()

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings of Trainer, task and data."""
        for section, cls in self.source.classes.items():
            kinds = argument_types(cls)
            if self.source.checkpoint:  # it has the values
                for name in [name for name in kinds if name not in FROM_ELSEWHERE]:
                    parser.add_argument(f"--{section}.{name}", type=kinds[name])
            else:
                parser.add_class_arguments(cls, section, instantiate=False, skip=FROM_ELSEWHERE & kinds.keys())
        parser.add_lightning_class_args(L.Trainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the flags that are no setting of Trainer, task or data, the bare names, and the YAML files' values."""
        assert isinstance(parser, SettingsParser)
        parser.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
        for flag in ("--ckpt_path", "--resume"):
            parser.add_argument(flag, help=RUN_FLAGS[flag])
        parser.add_bare_names()
        typed = parser.parse_given(dict(self.source.settings))
        for section, values in self.source.settings.items():
            names = [f"{section}.{name}" for name in values] if isinstance(values, Mapping) else [section]
            parser.set_defaults({name: typed[name] for name in names})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the words, then take a checkpoint's values for what they leave open.

        The parser imports and calls what values name, so it sees the user's words only.
        """
        assert isinstance(parser, SettingsParser)
        self.config = parser.parse_args(args)
        self.settings = _plain(self.config.as_dict())
        given = parser.parse_given(args).as_dict()
        if self.source.checkpoint:
            self._take_settings_of(self.source.checkpoint, given)
        with self._add_checkpoint_path():
            require_settings(self.settings)
        if self._print_config:
            print(yaml.safe_dump(self.run_settings, sort_keys=False), end="")
            sys.exit(0)
        if self.source.resumed:
            self._require_unchanged(given)
            if results.read_json(self.source.resumed / "result.json") is not None:
                print(f"{os.path.relpath(self.source.resumed)} already finished; see result.json")
                sys.exit(0)

    def _take_settings_of(self, checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
        checkpoint.require_known_attention(given.get("model", {}).get("attn"))
        for section, cls in self.source.classes.items():
            values = {name: value for name, value in given.get(section, {}).items() if name not in FROM_ELSEWHERE}
            self.settings[section] = checkpoint.settings(section, cls) | values
        self.settings["trainer"] |= checkpoint.trainer_settings | _plain(given.get("trainer", {}))
        seed = self.settings["data"].pop("seed", self.config.seed_everything)
        if "seed_everything" not in given:
            self.settings["seed_everything"] = self.config.seed_everything = seed

    def _require_unchanged(self, given: Mapping[str, Any]) -> None:
        for section, values in given.items():
            for name in values if section in (*SECTIONS, "trainer") else [section]:
                if name not in MAY_DIFFER:
                    raise UserError(
                        f"--resume {self.source.resumed}: a resumed run keeps its settings: drop --{name}, or start "
                        f"a new run from --ckpt_path {self.source.ckpt_path}"
                    )

    def instantiate_classes(self) -> None:
        """Build data, task and Trainer."""
        self.config_init = self.parser.instantiate_classes(self.config)
        arguments: dict[str, Mapping[str, Any]] = {name: vars(self.config_init[name]) for name in SECTIONS}
        if self.source.checkpoint:
            arguments = {name: self.settings[name] for name in SECTIONS}
            for name in TRAINER:
                self.config_init.trainer[name] = self.settings["trainer"][name]
        classes, seed = self.source.classes, {"seed": self.config.seed_everything}
        build = self.source.checkpoint.build if self.source.checkpoint else lambda cls, settings: cls(**settings)
        self.datamodule = build(
            classes["data"], {**arguments["data"], **(seed if "seed" in argument_types(classes["data"]) else {})}
        )
        self.model = build(classes["model"], {**arguments["model"], "spec": self.datamodule.spec})
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return a Trainer whose runs land in lightning_logs/<task>/<attn>/version_N with best and last checkpoint."""
        config = self.config_init.trainer
        callbacks = self.callbacks_of_fit(config) if self.command == "fit" else []
        if self.command == "fit":
            if config["logger"] in (None, True):
                kwargs["logger"] = self.logger(Path(config["default_root_dir"] or ".").resolve() / "lightning_logs")
        elif config["logger"] is None:
            kwargs["logger"] = False
        if config["enable_progress_bar"] is not False:  # after `FinalValidation`, whose validation it shows, too
            callbacks.append(ProgressBar(refresh_rate=20))
        if self.command == "predict":  # one process, so that one file holds all predictions in order
            kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        self.trainer_defaults["callbacks"] = callbacks
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ArithmeticError, ImportError, TypeError, ValueError) as error:
            raise UserError(f"--trainer: {error}") from error
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # unless the user's plugins change it
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def callbacks_of_fit(self, config: Mapping[str, Any]) -> list[Callback]:
        """Return the callbacks of training. A run without checkpoints has no best one."""
        callbacks: list[Callback] = [
            self.throughput,
            self.history,
            RunningState(),
            FinalValidation(),
            AttentionMaps(),
            SampleText(),
            SaveConfig(self.run_settings, {name: config[name] for name in TRAINER}),
            self.stop,
        ]
        if config["enable_checkpointing"] is not False and not config["fast_dev_run"]:
            self.best = BestCheckpoint(self.model.monitor, self.model.mode)
            callbacks += [self.best, LastCheckpoint(validates=config["limit_val_batches"] != 0)]
        return callbacks

    def logger(self, root: Path) -> RunLogger:
        """Return the logger of a new run, or of the run whose checkpoint is trained on."""
        if run := self.source.resumed:  # events after its checkpoint will be logged again
            step = self.checkpoint.content["global_step"] if self.checkpoint else -1
            return RunLogger(run.parent, run.name, purge_step=step + 1)
        task, attn = self.datamodule.task_name, self.model.hparams["attn"].rpartition(".")[2]
        run = run_of_checkpoint(self.source.ckpt_path) if self.source.ckpt_path else None
        if run is None or run.parts[-3:-1] != (task, attn):
            return RunLogger(root / task / attn)
        return RunLogger(run.parent, run.name)

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        return self.source.checkpoint or (Checkpoint(self.source.ckpt_path) if self.source.ckpt_path else None)

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings as a YAML of a run has them, plain data."""
        settings = {name: self.settings[name] for name in ("seed_everything", "compile", "trainer")}
        for section, cls in self.source.classes.items():
            name = class_name(cls)
            class_path = name if "." in name else f"kvt.tasks.{name}"
            settings[section] = {"class_path": class_path, "init_args": self.settings[section]}
        return {**settings, "ckpt_path": None if self.source.resumed else self.source.ckpt_path}

    def prepare_fit(self) -> None:
        """Find mistakes in settings, checkpoint and data before anything is written."""
        self._started = datetime.now(UTC)
        logger = self.trainer.logger
        if run := logger.folder if isinstance(logger, RunLogger) else log_dir(self.trainer):
            require_folder(Path(run), "run")
        if self.checkpoint:
            self.checkpoint.require_same_run(self.model, self.datamodule)
        self.datamodule.trainer = self.trainer
        with self._add_checkpoint_path():
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
        self.datamodule.val_dataloader()
        loader = self.datamodule.train_dataloader()
        config = self.config_init.trainer
        interval, batches = config["val_check_interval"], len(loader)
        if isinstance(interval, int) and interval > batches and config["check_val_every_n_epoch"] is not None:
            raise UserError(f"--val_check_interval {interval}: an epoch has only {batches} batches")
        if self.config.compile:
            if loader.ragged:
                raise UserError(f"--compile: batches of {self.datamodule.task_name} differ in length: drop the flag")
            compile_model(self.model, self.trainer.strategy.root_device)

    def fit(self) -> None:
        """Train, test the best checkpoint if asked to, write and print the result.

        A run that fails before its first step leaves no folder. One that is stopped by a signal says how to go on, and
        exits with 128 and the signal's number.
        """
        self.prepare_fit()
        if self.trainer.world_size > 1:
            self.stop.launch()
        try:
            with self._as_user_error():
                self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=self.source.ckpt_path)
            if self.trainer.global_step == 0:
                limits = "--max_epochs, --max_steps, --max_time and --limit_train_batches"
                raise UserError(f"nothing was trained: check {limits}")
        except SIGTERMException:
            self._end_stopped()
        except BaseException:
            if not self.throughput.has_trained and isinstance(self.trainer.logger, RunLogger):
                self.trainer.logger.discard()
            raise
        if self.stop.signal:
            self._end_stopped()
        with self._as_user_error():
            summary = self._conclude()
        if isinstance(self.trainer.logger, RunLogger):
            self.trainer.logger.release()
        if self.trainer.is_global_zero:
            print(f"\n{results.table(summary)}")

    @contextmanager
    def _as_user_error(self) -> Iterator[None]:
        """Raise a UserError from an error whose cause is the machine, a setting or a checkpoint."""
        try:
            yield
        except Exception as error:
            if message := self._explanation(error):
                raise UserError(message) from error
            raise

    def _explanation(self, error: Exception) -> str | None:
        logger = self.trainer.logger
        run = os.path.relpath(logger.log_dir) if isinstance(logger, RunLogger) else ""
        limit = resource_limit_message(error, run)
        if limit is None and self.trainer.world_size > 1 and re.search(LOST_PROCESS, str(error)):
            limit = "another process of this run died, possibly out of memory"
        if limit:
            return f"{limit}, then resume with --resume {run}" if run and self.throughput.has_trained else limit
        if isinstance(error, MisconfigurationException):
            return f"--trainer: {error}"
        return None

    def _end_stopped(self) -> NoReturn:
        if self.trainer.is_global_zero:
            run = log_dir(self.trainer) if self.best else None
            remedy = f"resume with --resume {os.path.relpath(run)}" if run else "nothing was saved"
            print(one_line(f"stopped at step {self.trainer.global_step}: {remedy}"), file=sys.stderr)
        sys.exit(128 + (self.stop.signal or signal.SIGTERM))

    def _conclude(self) -> dict[str, Any]:
        best = self.best.best_model_path if self.best else ""
        # taken before the test, which restores callbacks as they were at the best checkpoint
        history, diverged = self.history.rows, self.history.diverged
        speed = {"seconds": self.throughput.seconds, f"{self.model.unit}_per_second": self.throughput.rate}
        metrics = dict(read_checkpoint(best)["metrics"]) if best else {}
        if self.test_after_fit and "test" in self.datamodule.splits and not diverged:
            tested = self.trainer.test(self.model, self.datamodule, ckpt_path=best or None, verbose=False)
            metrics.update(*tested)
        if not self.trainer.is_global_zero:
            return {}
        summary = {
            "task": self.datamodule.task_name,
            "attn": self.model.hparams["attn"],
            "seed": self.config.seed_everything,
            **metrics,
            "seen_in_training": self.datamodule.seen_in_training,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **speed,
            **({"diverged": diverged} if diverged else {}),
        }
        details = {
            "started": self._started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "precision": str(self.trainer.precision),
            "notes": self.model.metric_notes,
            "config": self.run_settings,
        }
        run = None if self.config_init.trainer["fast_dev_run"] else log_dir(self.trainer)
        results.save_results(summary, details, history, self.trainer, Path(run) if run else None)
        return {**summary, "run": os.path.relpath(run)} if run else summary

    def validate(self) -> None:
        self._load_checkpoint()
        self.trainer.validate(self.model, self.datamodule)

    def test(self) -> None:
        self._load_checkpoint()
        self.trainer.test(self.model, self.datamodule)

    def predict(self) -> None:
        """Write predictions.csv, in the run's folder, or beside a checkpoint that lies elsewhere."""
        checkpoint, dry = Path(self.source.ckpt_path or ""), self.config_init.trainer["fast_dev_run"]
        path = (run_of_checkpoint(checkpoint) or checkpoint.resolve().parent) / "predictions.csv"
        if self.source.ckpt_path and not dry:
            require_folder(path.parent, "--ckpt_path")
        self._load_checkpoint()
        batches: Any = self.trainer.predict(self.model, self.datamodule)
        if not batches:
            raise UserError("nothing to predict: check --limit_predict_batches")
        if not dry:
            results.write_predictions(path, batches)
            print(f"predictions in {os.path.relpath(path)}")

    def _load_checkpoint(self) -> None:
        if not self.checkpoint:
            raise UserError(f"{self.command} needs --ckpt_path, a file under a run's checkpoints/")
        self.checkpoint.require_same_model(self.model)
        self.checkpoint.load_weights(self.model)
        with self._add_checkpoint_path():
            self.datamodule.prepare_data()
            self.datamodule.setup(self.command)

    def _add_checkpoint_path(self) -> AbstractContextManager[None]:
        return self.source.checkpoint.add_checkpoint_path() if self.source.checkpoint else nullcontext()


def compile_model(task: Task, device: torch.device) -> None:
    """Compile a task's model in place, so that its parameters keep their names; on a GPU into CUDA graphs."""
    task.model.compile(mode="reduce-overhead" if device.type == "cuda" else "default")


def _plain(value: Any) -> Any:
    """Return a copy for YAML and JSON: numbers, texts, lists and mappings; anything else as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | None) else str(value)
