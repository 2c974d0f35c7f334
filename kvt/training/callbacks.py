"""What is watched while a model trains: its speed and its attention maps."""

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from kvt.tasks import Task, TaskData
from kvt.training import attention_plots


class FinalValidation(L.Callback):
    """Ends every run with a validation, whatever ends it: its checkpoints and its result are of all its training.

    At `max_steps` the Trainer is told to stop, for then it validates before it does, and its checkpoint goes on amid
    the epoch. Any other run whose last step falls between two validations has one more when its training is over.

    Args:
        step: at which the run was validated last.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._over = False  # whether training is

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tells the Trainer to stop at `max_steps`."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remembers the step of this validation."""
        self.step = trainer.global_step
        trainer.fit_loop.epoch_loop._batches_that_stepped += self._over

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validates once more, unless the last step has been validated."""
        if self.step == trainer.global_step:
            return
        loop, self._over = trainer.fit_loop.epoch_loop, True
        loop._batches_that_stepped -= 1  # until it is logged, beside the last step, as Lightning does after an epoch
        trainer.validating, loop.val_loop.restarting = True, False  # all of it, though training may go on amid one
        loop.val_loop.run()
        trainer.training = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Validates a run that is stopped after its last training step: when resumed, it would train no more."""
        if isinstance(exception, SIGTERMException) and trainer.fit_loop.done:
            self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, int]:
        """The step of the last validation."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restores the step of the last validation."""
        self.step = state_dict["step"]


class Throughput(L.Callback):
    """Measures the seconds of training alone: validation, pictures and checkpoints are off the clock.

    Logs `train/seconds` and `train/<unit>_per_second` with the training metrics, and shows the latter in the progress
    bar. Its totals travel in checkpoints, so that a resumed run counts on.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count: int | Tensor = 0  # stays on the device until it is read
        self.running = False  # whether this process has come to train
        self._since: float | None = None  # None while the clock stands

    @property
    def rate(self) -> float:
        """Predictions a second, over all training so far."""
        return int(self.count) / self.seconds if self.seconds else 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock where it stands."""
        self._since = perf_counter() if self._since is None else self._since

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts a batch, and logs where the training metrics are logged."""
        assert isinstance(pl_module, Task)
        self.running = True
        self.count += pl_module.num_predictions(batch) * trainer.world_size
        if pl_module.logs_now:
            self._tick()
            pl_module.seconds = self.seconds
            pl_module.log("train/seconds", self.seconds)
            pl_module.log(f"train/{pl_module.unit}_per_second", self.rate)
            pl_module.log(f"{pl_module.unit}/s", self.rate, prog_bar=True, logger=False)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock until the next training batch."""
        self._stop(trainer)
        pl_module.seconds = self.seconds  # type: ignore[assignment]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock until the next training batch."""
        self._stop(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The totals so far."""
        return {"seconds": self.seconds, "count": int(self.count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Counts on from there."""
        self.seconds, self.count = state_dict["seconds"], state_dict["count"]

    def _stop(self, trainer: L.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # what is still queued is training
        self._tick()
        self._since = None

    def _tick(self) -> None:
        if self._since is not None:
            now = perf_counter()
            self.seconds += now - self._since
            self._since = now


class AttentionMaps(L.Callback):
    """Draws the attention maps of the first validation example into TensorBoard, at every validation.

    The picture is that of `kvt maps`: see `kvt.training.attention_plots.draw`.
    """

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks at the example and draws."""
        assert isinstance(pl_module, Task)
        if trainer.sanity_checking or not trainer.is_global_zero or not isinstance(trainer.logger, TensorBoardLogger):
            return
        data: TaskData = trainer.datamodule  # type: ignore[attr-defined]
        with torch.compiler.set_stance("force_eager"):  # a compiled model tells nobody of its layers
            layers = attention_plots.look(pl_module, data.example(0))
        if layers:
            picture = attention_plots.pixels(attention_plots.draw(layers, pl_module.hparams["attn"]))
            trainer.logger.experiment.add_image("attention", picture, trainer.global_step, dataformats="HWC")


class Samples(L.Callback):
    """Shows what the model can write in TensorBoard, at every validation."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Asks the task for it."""
        assert isinstance(pl_module, Task)
        if trainer.sanity_checking or pl_module.diverged or not isinstance(trainer.logger, TensorBoardLogger):
            return
        if (text := pl_module.sample()) is not None:
            trainer.logger.experiment.add_text("sample", text, trainer.global_step)


def without_plots(callbacks: Iterable[L.Callback]) -> list[L.Callback]:
    """Those that show nothing of what a model does: to draw that takes longer than to train a small one."""
    return [callback for callback in callbacks if not isinstance(callback, AttentionMaps | Samples)]
