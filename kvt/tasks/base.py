"""What all tasks share: a model, its loss and metrics, its optimiser."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from kvt.system.errors import UserError
from kvt.tasks.metrics import EXACT, WeightedMean
from kvt.tasks.schedules import cosine_warmup


class Task(L.LightningModule, ABC):
    """A model, its loss, its metrics and its optimiser.

    A subclass sets `self.model` and implements `compute_metrics`, `num_predictions` and `configure_optimizers`.
    A metric of an epoch is the mean over all its predictions, however they are batched. Training metrics are means
    since the last log, every `log_every_n_steps`. After each log, callbacks with a method
    `on_metric_logged(trainer, task, name, value)` are called.

    Raises:
        UserError: the data's `spec` lacks a key that the task needs.
    """

    unit: ClassVar[str]
    """What `num_predictions` counts: "images", "tokens"."""
    metric_names: ClassVar[tuple[str, ...]]
    """The means that `compute_metrics` returns."""
    monitor: ClassVar[str]
    """The metric that chooses the best checkpoint."""
    mode: ClassVar[str]
    """Whether its "max" or "min" is best."""
    needs: ClassVar[tuple[str, ...]]
    """The keys of the data's `spec` that the model is built from."""

    model: nn.Module

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # those of the subclass, too
        if missing := [key for key in self.needs if key not in spec]:
            raise UserError(f"--model {type(self).__name__} does not fit --data: these say nothing of {missing}")
        self.metrics = nn.ModuleDict(
            {f"{stage}/{name}": WeightedMean() for stage in ("train", "val", "test") for name in self.metric_names}
        )
        self._logged_step = 0

    @abstractmethod
    def compute_metrics(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss and the other means over the predictions of a batch, and any other outputs."""

    @abstractmethod
    def num_predictions(self, batch: Any) -> int | Tensor:
        """Return the number of predictions in a batch, in `unit`."""

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` in a batch."""
        return (batch[0],)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]] | None:
        """Return the tokens that label the rows and the columns of a layer's attention map, None for no labels.

        Args:
            layer: the attention layer's name in the model.
            inputs: the arguments of `forward`, for one example.
        """
        return None

    def overlay(self, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a picture and the attention weights to draw over it, None if the input is no picture.

        Args:
            weights: a layer's attention maps, (heads, N, M).
            inputs: the arguments of `forward`, for one example.

        Returns:
            The picture, uint8 (H, W, C), and a grid of weights for each head, (heads, rows, columns), that covers it.
        """
        return None

    def sample(self) -> str | None:
        """Return text that the model generates, as Markdown for TensorBoard, None if it generates none."""
        return None

    def check_causality(self) -> None:
        """Raise UserError if an output depends on a token that it must not see."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("train", batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._step("test", batch)

    @property
    def notes(self) -> dict[str, str]:
        """What a reader of the result should know about its metrics."""
        return {}

    @property
    def total_steps(self) -> int:
        """The number of optimiser steps of the run, for schedules.

        Raises:
            UserError: the run has no end.
        """
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < inf:
            raise UserError("--max_epochs or --max_steps must set an end: the schedule needs the number of steps")
        return int(steps)

    @property
    def logs_now(self) -> bool:
        """Whether the training metrics are logged after this batch."""
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.global_step != self._logged_step and self.global_step % max(interval, 1) == 0

    def on_fit_start(self) -> None:
        self.check_causality()

    def on_validation_start(self) -> None:
        self.check_causality()  # training may have taught the model to look ahead
        self._log_metrics("train")  # so that a checkpoint written after this validation has all of the run in it

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logs_now:
            self._logged_step = self.global_step
            self._log_metrics("train")

    def on_train_epoch_end(self) -> None:
        self._log_metrics("train")

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the classes of the task and its data, for `kvt.load`."""
        checkpoint["model_class"] = class_name(type(self))
        if (data := getattr(self.trainer, "datamodule", None)) is not None:
            checkpoint["data_class"] = class_name(type(data))

    def record(self, name: str, value: float | Tensor, prog_bar: bool = False) -> None:
        """Log a metric, and pass it to the callbacks that listen."""
        self.log(name, torch.as_tensor(value, dtype=EXACT), prog_bar=prog_bar)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_metric_logged"):
                callback.on_metric_logged(self.trainer, self, name, float(value))

    def _metric(self, stage: str, name: str) -> Metric:
        """Return the running mean of a stage."""
        metric = self.metrics[f"{stage}/{name}"]
        assert isinstance(metric, Metric)
        return metric

    def _step(self, stage: str, batch: Any) -> dict[str, Tensor]:
        computed, weight = self.compute_metrics(batch), self.num_predictions(batch)
        for name in self.metric_names:
            self._metric(stage, name).update(computed[name].detach(), weight)
        return computed

    def _log_metrics(self, stage: str) -> None:
        for name, mean in self._pop_means(stage).items():
            self.record(name, mean, prog_bar=stage != "test")

    def _pop_means(self, stage: str) -> dict[str, Tensor]:
        """Return the means of a stage that were updated, and reset them."""
        means = {}
        for name, metric in self.metrics.items():
            assert isinstance(metric, Metric)
            if name.startswith(f"{stage}/") and metric.update_called:
                means[name] = metric.compute()
                metric.reset()
        return means


def class_name(cls: type) -> str:
    """Return a class's name in a checkpoint: the bare name of one of kvt's, the import path of any other."""
    return cls.__name__ if cls.__module__.startswith("kvt.") else f"{cls.__module__}.{cls.__qualname__}"


def every_step(optimizer: Optimizer, schedule: LRScheduler) -> OptimizerLRScheduler:
    """Return the result of `configure_optimizers` for a schedule that moves with every step, not with every epoch."""
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def adam(task: Task, **settings: Any) -> Adam:
    """Return Adam at the task's `lr`, fused if the device supports it; `settings` are torch's."""
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in task.parameters())
    optimizer = Adam(task.parameters(), lr=task.hparams["lr"], fused=fused, **settings)
    # a fused Adam can unscale float16 gradients itself; Lightning refuses to clip those of an optimiser that does
    optimizer._step_supports_amp_scaling = False
    return optimizer


def adam_with_cosine(task: Task) -> OptimizerLRScheduler:
    """Return Adam at the task's `lr` with half a cosine over all steps under `warmup` steps of linear warm-up."""
    optimizer = adam(task)
    factor = cosine_warmup(task.hparams["warmup"], task.total_steps)
    return every_step(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


class Classification(Task):
    """Cross-entropy and accuracy, one class for each prediction; a batch is (inputs, targets)."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "acc")
    monitor = "val/acc"
    mode = "max"

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return loss and accuracy over all targets, and the logits."""
        inputs, targets = batch
        logits = self(inputs)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision would round the metrics
        loss = nn.functional.cross_entropy(exact.flatten(0, -2), targets.flatten())
        right = (logits.argmax(-1) == targets).sum(dtype=exact.dtype)
        return {"loss": loss, "acc": right / self.num_predictions(batch), "logits": logits}

    def num_predictions(self, batch: tuple[Tensor, Tensor]) -> int | Tensor:
        return batch[1].numel()

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the most probable class of every prediction, int64, for a batch of inputs as the data serves them."""
        prediction: Tensor = self(inputs.to(self.device)).argmax(-1)
        return prediction

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of every prediction, its probability, and the target."""
        inputs, targets = batch
        probability, prediction = torch.softmax(self(inputs).float(), -1).max(-1)
        return {"target": targets, "prediction": prediction, "probability": probability}
