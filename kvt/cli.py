"""The command line: `kvt fit|validate|test|predict`, and the experiment scripts, which are `fit` and then one test.

Both are one Lightning CLI. Any setting of a task's model or data, and any of the Trainer's, may be given by its bare
name: `--attn kv` is `--model.attn kv`, `--batch_size 64` is `--data.batch_size 64`, `--max_epochs 2` is
`--trainer.max_epochs 2`, and `--seed 1` is `--seed_everything 1`.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning as L
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
from kvt.errors import UserError, behind, require_positive, require_seed, says_out_of_memory
from kvt.flags import OneLineErrors, config_of_checkpoint, expand, require_configurations
from kvt.runs import RunLogger, run_of_checkpoint
from kvt.tasks import Task, TaskData

DESCRIPTION = """Train, validate, test and use the tasks of the Key-Value Transformer with any attention.
"kvt generate" continues a text and "kvt translate" translates, "kvt maps" draws attention, "kvt bench" measures what it
costs, "kvt study run" makes the runs of a grid and "kvt study report" their report, "kvt reproduce" both for the tables
and figures of the paper: see the --help of each.
Each task has a YAML (--config). Any setting of its model, its data or the Trainer has a bare flag: --attn kv is
--model.attn kv, --batch_size 64 is --data.batch_size 64, --max_epochs 2 is --trainer.max_epochs 2, --seed 1 is
--seed_everything 1. See "python experiments/cifar.py --help" for those of a task."""


class Parser(OneLineErrors, LightningArgumentParser):
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
        self.throughput = Throughput()
        self.best: BestCheckpoint | None = None
        super().__init__(
            Task,
            TaskData,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            parser_kwargs={"description": DESCRIPTION},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed for everything, and the model told what it must know of the data."""
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
        batches = len(self.datamodule.train_dataloader())
        interval = self.config["fit"]["trainer"]["val_check_interval"]
        by_epoch = self.config["fit"]["trainer"]["check_val_every_n_epoch"] is not None
        if by_epoch and isinstance(interval, int) and interval > batches:
            raise UserError(f"--val_check_interval {interval}: an epoch has {batches} batches only")

    def fit(self, **kwargs: Any) -> None:
        """Trains. A run that fails before its first step leaves no folder."""
        try:
            self.trainer.fit(**kwargs)
        except BaseException as error:
            if not self.throughput.running and isinstance(self.trainer.logger, RunLogger):
                self.trainer.logger.discard()
            if isinstance(error, MisconfigurationException):
                raise UserError(f"--trainer: {error}") from error
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
        speed = {"seconds": self.throughput.seconds, f"{self.model.unit}_per_second": self.throughput.rate}
        history, diverged = self.model.history, self.model.diverged
        if self.test_after_fit and "test" in self.datamodule.splits and not diverged:
            # which restores callbacks and history, as they were at the best checkpoint
            tested = self.trainer.test(self.model, self.datamodule, ckpt_path=best or None, verbose=False)
            metrics |= tested[0] if tested else {}
        run = self.trainer.log_dir if self.trainer.logger else None  # every process must ask
        if self.trainer.is_global_zero:
            self._record(metrics, speed, history, diverged, run)

    def _record(
        self,
        metrics: dict[str, float],
        speed: dict[str, float],
        history: Sequence[Mapping[str, float]],
        diverged: str | None,
        run: str | None,
    ) -> None:
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
        print(f"\n{report.table(rows)}")

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


def run(command: Callable[[], object]) -> None:
    """Runs a command; a user's mistake becomes one line on stderr and exit code 2.

    Every other exception keeps its traceback: it is a bug of ours, or of the user's own class.
    """
    sys.path.append(os.getcwd())  # attentions in the user's own folder
    _quiet()
    try:
        command()
        sys.stdout.flush()
    except BrokenPipeError:  # as in `kvt generate | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        mistake = user_error(error)
        if mistake is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
        sys.exit(2)


def _quiet() -> None:
    """Keeps what Lightning says to its developers from its users."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # what was asked for by a flag
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for message in (
        "LeafSpec",  # deprecated in torch
        "smaller than the logging interval",  # the end of an epoch is logged too
        "callbacks used to create the checkpoint",  # a test has none of fit's
        "exists and is not empty",  # a run goes on in its own folder
        "missing from font",  # a symbol that a picture can only show as a box
        "sync_dist=True",  # the means are synchronised before they are logged
    ):
        warnings.filterwarnings("ignore", message=f".*{message}")


def user_error(error: BaseException) -> str | None:
    """The message of the deepest `UserError` behind an exception, for parsers wrap what they catch."""
    found = None
    for led in behind(error):
        if isinstance(led, UserError):
            found = str(led)
        elif says_out_of_memory(led):
            found = f"out of memory: choose a smaller model, batch or data set ({str(led).splitlines()[0]:.100})"
    return found
