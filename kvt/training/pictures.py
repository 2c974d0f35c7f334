"""Attention maps and sample texts at every validation, in each logger that takes them: TensorBoard, W&B, MLflow."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from kvt.tasks import TaskData
from kvt.training import attention_plots
from kvt.training.recorder import Recorder


class AttentionMaps(Callback):
    """Draws the attention maps of the first validation example, like `kvt maps`."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not _wanted(trainer):
            return
        data: TaskData = trainer.datamodule  # type: ignore[attr-defined]
        with torch.compiler.set_stance("force_eager"):  # hooks are not called in a compiled model
            layers = attention_plots.collect_maps(pl_module, data.example(0))
        if layers and (loggers := _takers(trainer)):
            picture = attention_plots.pixels(attention_plots.draw(layers, pl_module.hparams["attn"]))
            show_picture(loggers, "attention", picture, trainer.global_step)


class SampleText(Callback):
    """Shows text that the model generates, unless it has diverged."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if _wanted(trainer) and not self.recorder.diverged and (text := pl_module.sample()) is not None:
            show_text(_takers(trainer), "sample", text, trainer.global_step)


def show_picture(loggers: Sequence[Logger], name: str, picture: np.ndarray, step: int) -> None:
    """Log a picture, uint8 (height, width, 3)."""
    for logger in loggers:
        match logger:
            case TensorBoardLogger():
                logger.experiment.add_image(name, picture, step, dataformats="HWC")
            case WandbLogger():
                logger.log_image(name, [picture], step)
            case MLFlowLogger():
                logger.experiment.log_image(logger.run_id, picture, key=name, step=step)


def show_text(loggers: Sequence[Logger], name: str, text: str, step: int) -> None:
    """Log a text, Markdown."""
    for logger in loggers:
        match logger:
            case TensorBoardLogger():
                logger.experiment.add_text(name, text, step)
            case WandbLogger():
                logger.log_text(name, ["text"], [[text]], step=step)
            case MLFlowLogger():
                logger.experiment.log_text(logger.run_id, text, f"{name}/step_{step}.md")


def _wanted(trainer: Trainer) -> bool:
    """Whether this validation is shown. All processes agree: with sharded weights, a model runs on all or on none."""
    return not trainer.sanity_checking and trainer.strategy.broadcast(bool(_takers(trainer)))


def _takers(trainer: Trainer) -> list[Logger]:
    """Return the loggers that take pictures and texts; the first process alone has any."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger)]
