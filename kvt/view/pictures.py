"""A callback that shows attention maps and sample texts in the loggers after validations."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from kvt.attention import Attention
from kvt.tasks import TaskData
from kvt.view import maps

TAG = "visual/attention"
"""The first part of a picture's name, which TensorBoard sorts after the curves of train/ and val/."""


class Shown(Callback):
    """A callback that logs attention maps and a sample text after validations 1, 2, 4, 8 …, and after the last one.

    Pictures after every validation may take longer than the training of a small model. A resumed run counts
    validations from 1 again.
    """

    _validations = _shown = 0  # the number of validations, and the number of the last one with pictures

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._validations += 1
            if self._validations.bit_count() == 1:
                self._show(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self._shown != self._validations:
            pl_module.eval()
            self._show(trainer, pl_module)
            pl_module.train()

    def show_maps(self, loggers: Sequence[Any], pl_module: Any, trainer: Trainer) -> None:
        """Log the maps of the first validation example: a picture for each layer, as narrow as TensorBoard's cards.

        A model with an attention that has no map gets no pictures.
        """
        if not all(layer.has_map for layer in pl_module.modules() if isinstance(layer, Attention)):
            return
        data: TaskData = trainer.datamodule  # type: ignore[attr-defined]
        with torch.compiler.set_stance("force_eager"):  # a compiled model calls no hooks
            _, caption, layers = maps.examine(pl_module, data.example(0))
        for layer in layers:
            picture = maps.pixels(maps.draw([layer], maps.titled(pl_module.attn, caption), columns=2))
            name = f"{TAG}/{maps.in_words(layer.name)}"
            for logger in loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image(name, picture, trainer.global_step, dataformats="HWC")
                else:
                    logger.log_image(name, [picture], step=trainer.global_step)

    def show_text(self, loggers: Sequence[Any], pl_module: Any, trainer: Trainer) -> None:
        """Log a generated text in TensorBoard, if the task generates text and the validation loss is finite."""
        boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        if boards and trainer.callback_metrics["val/loss"].isfinite() and (text := pl_module.sample()) is not None:
            for board in boards:
                board.experiment.add_text("sample", text, trainer.global_step)

    def _show(self, trainer: Trainer, pl_module: Any) -> None:
        self._shown = self._validations
        takers = [own for own in trainer.loggers if isinstance(own, TensorBoardLogger) or hasattr(own, "log_image")]
        if takers:  # only the first process of a run has loggers
            with torch.no_grad():
                self.show_maps(takers, pl_module, trainer)
                self.show_text(takers, pl_module, trainer)
