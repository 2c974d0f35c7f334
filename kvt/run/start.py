"""`StartRun`, the callback that creates and locks a run's folder and makes its loggers."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from kvt.run.cli import KvtCLI
from kvt.run.folder import RunFolder
from kvt.run.lightning_internals import OutsideSteps
from kvt.run.loggers import hyperparameters, make_loggers
from kvt.system.console import say
from kvt.system.errors import UserError
from kvt.system.quoting import printable


class StartRun(OutsideSteps, Callback):
    """A callback that creates a run's folder and loggers once all processes have started.

    Until all processes have started, Ctrl-C ends them at once, and the run leaves no file.

    Args:
        path: path of the run's folder; if `is_new`, path of the parent of the new folder.
        is_new: whether to create a new folder version_N.
        cli: the parsed settings of the run.
        purge_step: the first step that a resumed run logs again; None: the run is new.
        quiet: if True, the callback does not print the path of the folder.

    Attributes:
        folder: the run's folder in the first process; None in other processes, and under --fast_dev_run.
    """

    def __init__(self, path: Path, is_new: bool, cli: KvtCLI, purge_step: int | None, quiet: bool) -> None:
        self.path, self.is_new, self.cli, self.purge_step, self.quiet = path, is_new, cli, purge_step, quiet
        self.folder: RunFolder | None = None
        self.loggers: list[Logger] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        content = trainer.datamodule.content
        if not trainer.strategy.reduce_boolean_decision(trainer.strategy.broadcast(content) == content):
            raise UserError("the data changed while the processes of this run started: start the run again")
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self.folder = RunFolder.new(self.path) if self.is_new else RunFolder(self.path)
        self.folder.write_config(self.cli.run_config)
        self.loggers = make_loggers(self.cli.config_init.trainer.logger, self.folder.path, self.purge_step)
        trainer.loggers = self.loggers
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):  # writes them to hparams.yaml
                logger.hparams.update(hyperparameters(pl_module, trainer.datamodule, self.cli.run_config.as_dict()))
        if not self.quiet:
            resumed = "" if self.purge_step is None else f", resumed after step {self.purge_step - 1}"
            path = printable(os.path.relpath(self.folder.path))
            say(f"{path}: {pl_module.num_parameters:,} parameters{resumed}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Log the hyperparameters, except to TensorBoard, which gets them with the scores at the end of the run."""
        for logger in self.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(hyperparameters(pl_module, trainer.datamodule, self.cli.run_config.as_dict()))

    def release(self) -> None:
        """Unlock the folder."""
        if self.folder:
            self.folder.release()

    def discard(self) -> None:
        """Remove the folder and the loggers' files of a run that has not trained."""
        if self.folder:
            for logger in self.loggers:
                with suppress(OSError):  # the disk may be full
                    logger.finalize("failed")  # closes the writer
            self.loggers = []
            self.folder.discard()
