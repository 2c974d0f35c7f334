"""The command line: `kvt fit|validate|test|predict`, and the experiment scripts, which are `fit` and then `test`.

Both are one Lightning CLI. Any setting of a task's model or data, and any of the Trainer's, may be given by its bare
name: `--attn kv` is `--model.attn kv`, `--batch_size 64` is `--data.batch_size 64`, `--max_epochs 2` is
`--trainer.max_epochs 2`, and `--seed 1` is `--seed_everything 1`.
"""

import csv
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kvt import report
from kvt.callbacks import AttentionMaps, Throughput
from kvt.checkpoints import read_checkpoint, require_fit
from kvt.errors import UserError
from kvt.flags import config_of_checkpoint, expand, readable
from kvt.runs import RunLogger, number_of_run
from kvt.tasks import Task, TaskData

DESCRIPTION = """Train, validate, test and use the tasks of the Key-Value Transformer with any attention.
Each task has a YAML (--config). Any setting of its model, its data or the Trainer has a bare flag: --attn kv is
--model.attn kv, --batch_size 64 is --data.batch_size 64, --max_epochs 2 is --trainer.max_epochs 2, --seed 1 is
--seed_everything 1. See "python experiments/cifar.py --help" for those of a task."""


class Parser(LightningArgumentParser):
    """A parser that raises a user's mistake instead of printing usage and leaving."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises `UserError`."""
        raise UserError(readable(message)) from ex


class CLI(LightningCLI):
    """The Lightning CLI with this project's defaults: logger, callbacks, seed, checks of the checkpoint.

    Args:
        argv: the words after the program's name.
    """

    tests_after_fit: ClassVar[bool] = False

    def __init__(self, argv: Sequence[str]) -> None:
        self.best: ModelCheckpoint | None = None
        self.argv = [*argv[:1], *config_of_checkpoint(argv), *argv[1:]]
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
        parser.link_arguments("data", "model.init_args.spec", compute_fn=_spec, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the words, bare flags written in full."""
        self.config = parser.parse_args(expand(self.argv))
        seed = self.config[self.config["subcommand"]]["seed_everything"]
        if isinstance(seed, bool):
            raise UserError(f"--seed {seed}: expected a whole number")

    def _parse_ckpt_path(self) -> None:
        """Leaves the configuration as it was given: a checkpoint that does not fit it is refused, see `require_fit`."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A Trainer whose runs land in lightning_logs/<task>/<attn>/version_N and keep the best checkpoint."""
        config = self._get(self.config_init, "trainer")
        fits = self.subcommand == "fit"
        self.trainer_defaults["callbacks"] = self._callbacks(config)
        if fits:
            if config["logger"] in (None, True):
                root = Path(config["default_root_dir"] or ".") / "lightning_logs"
                task, attn = self.datamodule.task_name, self.model.hparams["attn"].rpartition(".")[2]
                number = number_of_run(self._get(self.config_init, "ckpt_path") or "", root / task / attn)
                kwargs["logger"] = RunLogger(root, task, attn, number)
                self.save_config_kwargs = {"overwrite": number is not None}
        elif config["logger"] is None:
            kwargs["logger"] = False
        if not fits or config["logger"] is False:
            self.save_config_callback = None  # there is no folder of the run's own to keep it in
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError) as error:
            raise UserError(f"--trainer: {error}") from error

    def _callbacks(self, config: dict[str, Any]) -> list[Callback]:
        callbacks: list[Callback] = []
        if config["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar(refresh_rate=20))
        if self.subcommand != "fit":
            return callbacks
        callbacks += [Throughput(), AttentionMaps()]
        if config["enable_checkpointing"] is not False and not config["fast_dev_run"]:
            monitor, mode = self.model.monitor, self.model.mode
            self.best = ModelCheckpoint(monitor=monitor, mode=mode, filename="best", save_last=True)
            callbacks.append(self.best)
        return callbacks

    def before_fit(self) -> None:
        """Finds what may be wrong with checkpoint and data before anything is written."""
        self._started = datetime.now(UTC)
        if ckpt_path := self._get(self.config_init, "ckpt_path"):
            require_fit(ckpt_path, self.model)
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.datamodule.train_dataloader()

    def before_validate(self) -> None:
        """Looks at the checkpoint."""
        ckpt_path = self._get(self.config_init, "ckpt_path")
        if not ckpt_path:
            raise UserError(f"{self.subcommand} needs --ckpt_path, a file under a run's checkpoints/")
        require_fit(ckpt_path, self.model)

    before_test = before_predict = before_validate

    def after_fit(self) -> None:
        """Tests the best checkpoint, if this is an experiment; then records and prints the result."""
        best = self.best.best_model_path if self.best else ""
        metrics: dict[str, float] = read_checkpoint(best)["metrics"] if best else {}
        if self.tests_after_fit:
            metrics |= self.trainer.test(self.model, self.datamodule, ckpt_path=best or None, verbose=False)[0]
        if self.trainer.is_global_zero:
            self._record(metrics)

    def _record(self, metrics: dict[str, float]) -> None:
        throughput = next(c for c in self.trainer.callbacks if isinstance(c, Throughput))  # type: ignore[attr-defined]
        rows: dict[str, Any] = {
            "task": self.datamodule.task_name,
            "attn": self.model.hparams["attn"],
            "seed": self.config[self.subcommand]["seed_everything"],
            **metrics,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": throughput.seconds,
            f"{self.model.unit}_per_second": throughput.rate,
        }
        logger = self.trainer.logger
        if isinstance(logger, TensorBoardLogger):
            run = Path(logger.log_dir)
            hparams = {**self.model.hparams, **self.datamodule.hparams}
            logger.log_hyperparams(hparams, {f"best/{name.replace('/', '_')}": v for name, v in metrics.items()})
            details = {
                "started": self._started.isoformat(timespec="seconds"),
                "precision": str(self.trainer.precision),
                **report.environment(),
                "config": self.config[self.subcommand].as_dict(),
            }
            report.write_json(run / "result.json", rows | details)
            rows["run"] = run
        print(f"\n{report.table(rows)}")

    def after_predict(self) -> None:
        """Writes predictions.csv beside the checkpoint's folder: one line a prediction."""
        batches = self.trainer.predict_loop.predictions
        path = Path(self._get(self.config_init, "ckpt_path")).resolve().parent.parent / "predictions.csv"
        columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        part = path.with_name(f"{path.name}.part-{os.getpid()}")
        with part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["example", *columns])
            for example, values in enumerate(zip(*(c.tolist() for c in columns.values()), strict=True)):
                writer.writerow([example, *values])
        os.replace(part, path)
        print(f"predictions in {path}")


def _spec(data: TaskData) -> dict[str, Any]:
    return data.spec


def run(command: Callable[[], object]) -> None:
    """Runs a command; a user's mistake becomes one line on stderr and exit code 2.

    Every other exception keeps its traceback: it is a bug of ours.
    """
    sys.path.insert(0, os.getcwd())  # attentions in the user's own folder
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # of torch to Lightning, not to its users
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")  # the epoch's end is logged too
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")  # a test has none of fit's
    try:
        command()
    except Exception as error:
        mistake = _user_error(error)
        if mistake is None:
            raise
        print(f"error: {' '.join(str(mistake).split())}", file=sys.stderr)
        sys.exit(2)


def _user_error(error: BaseException | None) -> UserError | None:
    """The deepest `UserError` behind an exception: parsers wrap what they catch."""
    found = None
    while error is not None:
        found = error if isinstance(error, UserError) else found
        error = error.__cause__ or error.__context__
    return found


def main() -> None:
    """The `kvt` command."""
    run(lambda: CLI(sys.argv[1:]))


if __name__ == "__main__":
    main()
