"""Attention maps and sample texts at every validation, in each logger that takes them: TensorBoard, W&B, MLflow."""

import re
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from kvt.run.recorder import Recorder
from kvt.tasks import TaskData
from kvt.view import maps

TAG = "visual/attention"
"""Behind train/ and val/, whose curves TensorBoard shows first, as it sorts by name."""


class AttentionMaps(Callback):
    """Draws the attention maps of the first validation example: of each layer a picture as narrow as its card."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not _wanted(trainer):
            return
        data: TaskData = trainer.datamodule  # type: ignore[attr-defined]
        with torch.compiler.set_stance("force_eager"):  # hooks are not called in a compiled model
            _, caption, layers = maps.examine(pl_module, data.example(0))
        if layers and (loggers := _takers(trainer)):
            title = maps.titled(pl_module.attn, caption)
            for layer in layers:
                picture = maps.pixels(maps.draw([layer], title, columns=2))
                name = f"{TAG}/{maps.in_words(layer.name)}"
                for logger in loggers:
                    _show(logger, name, picture, trainer.global_step)


def _show(logger: Logger, name: str, picture: np.ndarray, step: int) -> None:
    match logger:
        case TensorBoardLogger():
            logger.experiment.add_image(name, picture, step, dataformats="HWC")
        case WandbLogger():
            logger.log_image(name, [picture], step)
        case MLFlowLogger():
            logger.experiment.log_image(logger.run_id, picture, key=re.sub(r"\W+", "_", name), step=step)


class SampleText(Callback):
    """Shows text that the model generates, unless it has diverged."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not _wanted(trainer) or self.recorder.diverged or (text := pl_module.sample()) is None:
            return
        for logger in _takers(trainer):
            match logger:
                case TensorBoardLogger():
                    logger.experiment.add_text("sample", text, trainer.global_step)
                case WandbLogger():
                    logger.log_text("sample", ["text"], [[text]], step=trainer.global_step)
                case MLFlowLogger():
                    logger.experiment.log_text(logger.run_id, text, f"sample/step_{trainer.global_step}.md")


def _wanted(trainer: Trainer) -> bool:
    """Return whether to show this validation; all processes agree, since they run a sharded model together."""
    return not trainer.sanity_checking and trainer.strategy.broadcast(bool(_takers(trainer)))


def _takers(trainer: Trainer) -> list[Logger]:
    """Return the loggers that accept pictures and text; only the first process has loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger)]
