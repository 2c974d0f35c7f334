"""The command line: `kvt fit|validate|test|predict`, and the experiment scripts, which are `fit` and then one test.

Both are one Lightning CLI. Any setting of a task's model or data, and any of the Trainer's, may be given by its bare
name: `--attn kv` is `--model.attn kv`, `--batch_size 64` is `--data.batch_size 64`, `--max_epochs 2` is
`--trainer.max_epochs 2`, and `--seed 1` is `--seed_everything 1`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kvt import report
from kvt.callbacks import (
    AttentionMaps,
    BestCheckpoint,
    ConfigInCheckpoint,
    LastCheckpoint,
    LastValidation,
    Samples,
    Throughput,
)
from kvt.checkpoints import read_checkpoint, require_same_model, require_same_run
from kvt.errors import UserError, require_positive, require_seed
from kvt.flags import SettingErrors, config_of_checkpoint, expand, require_configurations
from kvt.processor import tune
from kvt.runs import RunLogger, run_of_checkpoint
from kvt.tasks import Task, TaskData

COMPILE_HELP = """whether torch compiles the model first: a minute's wait, then fewer launches a step, on a GPU a few
(CUDA graphs); not for translation, nor in a fleet"""


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
        self.argv, self.test_after_fit = [*argv[:1], *config_of_checkpoint(argv), *argv[1:]], test
        tune()
        self.throughput = Throughput()
        self.best: BestCheckpoint | None = None
        super().__init__(
            Task,
            TaskData,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed for everything, and the model told what it must know of the data."""
        parser.add_argument("--compile", type=bool, default=False, help=COMPILE_HELP)
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.link_arguments("data", "model.init_args.spec", compute_fn=attrgetter("spec"), apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the words, bare flags written in full, and checks what the parser cannot."""
        require_configurations(self.argv)
        self.config = parser.parse_args(expand(self.argv))
        settings = self.config[self.config["subcommand"]]
        require_seed(settings["seed_everything"])
        for name in ("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "gradient_clip_val"):
            if (number := settings["trainer"][name]) is not None and not isinstance(number, str):
                require_positive(**{f"--{name}": number})

    def _parse_ckpt_path(self) -> None:
        """Leaves the configuration as it was given: a checkpoint that does not fit it is refused."""

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the user names."""
        path: str | None = self._get(self.config, "ckpt_path")
        return path

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A Trainer whose runs land in lightning_logs/<task>/<attn>/version_N and keep best and last checkpoint."""
        config = self._get(self.config_init, "trainer")
        callbacks: list[Callback] = []
        if config["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar(refresh_rate=20))
        if self.subcommand == "fit":
            callbacks += self._callbacks_of_fit(config)
            if config["logger"] in (None, True):
                kwargs["logger"] = self._logger(Path(config["default_root_dir"] or ".").resolve() / "lightning_logs")
        elif config["logger"] is None:
            kwargs["logger"] = False
        if self.subcommand == "predict":  # one process, so that one file holds all predictions in order
            kwargs |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
        if self.subcommand != "fit" or config["logger"] is False:
            self.save_config_callback = None  # there is no folder of the run's own to keep it in
        self.trainer_defaults["callbacks"] = callbacks
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            raise UserError(f"--trainer: {error}") from error

    def _callbacks_of_fit(self, config: Mapping[str, Any]) -> list[Callback]:
        yaml = self._parser("fit").dump(self.config["fit"], skip_none=False)
        callbacks: list[Callback] = [
            self.throughput,
            LastValidation(),
            AttentionMaps(),
            Samples(),
            ConfigInCheckpoint(yaml),
        ]
        if config["enable_checkpointing"] is not False and not config["fast_dev_run"]:
            self.best = BestCheckpoint(self.model.monitor, self.model.mode)
            callbacks += [self.best, LastCheckpoint()]
        return callbacks

    def _logger(self, root: Path) -> RunLogger:
        task, attn = self.datamodule.task_name, self.model.hparams["attn"].rpartition(".")[2]
        run = run_of_checkpoint(self.ckpt_path) if self.ckpt_path else None
        if run is None or run.parts[-3:-1] != (task, attn):
            return RunLogger(root / task / attn)
        self.save_config_callback = None  # it is there already
        return RunLogger(run.parent, run.name)

    def before_fit(self) -> None:
        """Finds what may be wrong with checkpoint and data before anything is written."""
        self._started = datetime.now(UTC)
        if self.ckpt_path:
            require_same_run(self.ckpt_path, self.model, self.datamodule)
        self.datamodule.trainer = self.trainer
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.datamodule.val_dataloader()
        loader = self.datamodule.train_dataloader()
        batches = len(loader)
        interval = self.config["fit"]["trainer"]["val_check_interval"]
        by_epoch = self.config["fit"]["trainer"]["check_val_every_n_epoch"] is not None
        if by_epoch and isinstance(interval, int) and interval > batches:
            raise UserError(f"--val_check_interval {interval}: an epoch has {batches} batches only")
        if self.config["fit"]["compile"]:
            if loader.ragged:
                raise UserError(f"--compile: the batches of {self.datamodule.task_name} differ in length: leave it out")
            compile_model(self.model, self.trainer.strategy.root_device)

    def fit(self, **kwargs: Any) -> None:
        """Trains. A run that fails before its first step leaves no folder."""
        try:
            self.trainer.fit(**kwargs)
        except BaseException as error:
            if not self.throughput.running and isinstance(self.trainer.logger, RunLogger):
                self.trainer.logger.discard()
            if isinstance(error, MisconfigurationException):
                raise UserError(f"--trainer: {error}") from error
            if type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc"):
                reason = str(error).strip().partition("\n")[0]
                raise UserError(f"--compile: torch cannot compile this model here, leave it out ({reason})") from error
            raise

    def _require_checkpoint(self) -> None:
        if not self.ckpt_path:
            raise UserError(f"{self.subcommand} needs --ckpt_path, a file under a run's checkpoints/")
        require_same_model(self.ckpt_path, self.model)

    before_validate = before_test = before_predict = _require_checkpoint

    def after_fit(self) -> None:
        """Tests the best checkpoint, if asked to; then records and prints the result."""
        best = self.best.best_model_path if self.best else ""
        best = best if Path(best).is_file() else ""
        metrics: dict[str, float] = read_checkpoint(best)["metrics"] if best else {}
        speed, history, diverged = self.speed, self.model.history, self.model.diverged
        if self.test_after_fit and "test" in self.datamodule.splits and not diverged:
            metrics |= self._test(best)
        run = self.trainer.log_dir if self.trainer.logger else None  # every process must ask
        if self.trainer.is_global_zero:
            self.show(self._record(metrics, speed, history, diverged, run))

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
        print(f"\n{report.table(rows)}")

    def _record(
        self,
        metrics: dict[str, float],
        speed: dict[str, float],
        history: Sequence[Mapping[str, float]],
        diverged: str | None,
        run: str | None,
    ) -> dict[str, Any]:
        """Writes what the run leaves behind; returns what there is to show of it."""
        rows: dict[str, Any] = {
            "task": self.datamodule.task_name,
            "attn": self.model.hparams["attn"],
            "seed": self.config["fit"]["seed_everything"],
            **metrics,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            **speed,
            **({"diverged": diverged} if diverged else {}),
        }
        if run and not self.config["fit"]["trainer"]["fast_dev_run"]:
            details = {
                "started": self._started.isoformat(timespec="seconds"),
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "precision": str(self.trainer.precision),
                "notes": self.model.notes,
                **report.environment(),
                "config": self.config["fit"].as_dict(),
            }
            report.write_history(Path(run) / "history.csv", history)
            report.write_json(Path(run) / "result.json", rows | details)
            rows["run"] = os.path.relpath(run)
        if isinstance(self.trainer.logger, TensorBoardLogger):
            hparams = {**self.model.hparams, **self.datamodule.hparams, **self.model.notes}
            del hparams["spec"]  # may hold a whole vocabulary
            best = {f"best/{name.replace('/', '_')}": value for name, value in metrics.items()}
            self.trainer.logger.log_hyperparams(hparams, best)
        return rows

    def after_predict(self) -> None:
        """Writes predictions.csv into the run's folder, or beside a checkpoint that lies elsewhere."""
        batches = self.trainer.predict_loop.predictions
        if not batches:
            raise UserError("predict: no batch to predict, see --limit_predict_batches")
        if not self.config["predict"]["trainer"]["fast_dev_run"]:
            checkpoint = Path(self.ckpt_path or "")
            path = (run_of_checkpoint(checkpoint) or checkpoint.resolve().parent) / "predictions.csv"
            report.write_predictions(path, batches)
            print(f"predictions in {os.path.relpath(path)}")


def compile_model(task: Task, device: torch.device) -> None:
    """Lets torch compile a task's model in place, so that its parts keep their names.

    On a GPU it then replays CUDA graphs, one launch for all the kernels of a pass.
    """
    torch._logging.set_logs(inductor=logging.ERROR)  # what goes wrong is said once, by us
    task.model.compile(mode="reduce-overhead" if device.type == "cuda" else "default")
