"""What all tasks share of their training: how a step is taken, a metric averaged, a run gone on with."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from kvt.system.errors import UserError
from kvt.tasks.history import Row, remember
from kvt.tasks.metrics import EXACT, WeightedMean
from kvt.tasks.schedules import cosine_warmup


class Task(L.LightningModule, ABC):
    """A model, its loss, its optimiser. Metrics are means over all predictions of an epoch, whatever the batches.

    A subclass sets `self.model` and says `compute_metrics` and `configure_optimizers`. While training the running means
    are logged every `log_every_n_steps`, else once at the end.
    """

    unit: ClassVar[str]
    """What `num_predictions` counts and the throughput is given in: "images", "tokens"."""
    metric_names: ClassVar[tuple[str, ...]]
    """The means that `compute_metrics` returns."""
    monitor: ClassVar[str]
    """The metric that chooses the best checkpoint …"""
    mode: ClassVar[str]
    """… by its "max" or "min"."""
    needs: ClassVar[tuple[str, ...]]
    """The keys of the data's `spec` that the model is made from."""

    model: nn.Module
    history: list[Row]
    """What was logged of training and validation so far."""
    seconds: float
    """Of training so far, as whoever keeps the clock says."""
    diverged: str | None
    """Which mean was no finite number any more, and when; training stops there."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # of the subclass, too; a `spec` may hold a whole vocabulary
        if missing := [key for key in self.needs if key not in spec]:
            raise UserError(f"--model {type(self).__name__} does not fit --data: these say nothing of {missing}")
        self.metrics = nn.ModuleDict(
            {f"{stage}/{name}": WeightedMean() for stage in ("train", "val", "test") for name in self.metric_names}
        )
        self.history, self.seconds, self.diverged = [], 0.0, None
        self._logged_step = 0
        self._loaded_gradients: dict[str, Tensor] = {}  # of a step that a checkpoint was written in the midst of

    @abstractmethod
    def compute_metrics(self, batch: Any) -> dict[str, Tensor]:
        """The loss and the other means over the predictions of a batch; and whatever else is of use."""

    @abstractmethod
    def num_predictions(self, batch: Any) -> int | Tensor:
        """The number of predictions in a batch, in `unit`."""

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """What `forward` takes of a batch."""
        return (batch[0],)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]] | None:
        """The tokens that label the rows and the columns of a layer's map; None where they have no name.

        Args:
            layer: the attention layer's name in the model.
            inputs: of one example, what `forward` takes.
        """
        return None

    def overlay(self, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """A picture to lay the maps of a layer over; None where an input is no picture.

        Args:
            weights: the maps, (heads, N, M).
            inputs: of one example, what `forward` takes.

        Returns:
            The picture, uint8 (H, W, C), and a grid of weights a head, (heads, rows, columns), that covers it.
        """
        return None

    def sample(self) -> str | None:
        """What the model can write by now, as Markdown for TensorBoard; None where it writes nothing."""
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model makes of its inputs."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return self._step("train", batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Adds a batch to the means of the validation split; what was measured goes to `on_validation_batch_end`."""
        return self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Adds a batch to the means of the test split; what was measured goes to `on_test_batch_end`."""
        return self._step("test", batch)

    @property
    def notes(self) -> dict[str, str]:
        """What a reader of the result should know of its metrics."""
        return {}

    @property
    def total_steps(self) -> int:
        """The number of optimiser steps of the run, which a schedule may need to know.

        Raises:
            UserError: the run has no end.
        """
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < inf:
            raise UserError("--max_epochs or --max_steps must set an end: the schedule needs the number of steps")
        return int(steps)

    @property
    def logs_now(self) -> bool:
        """Whether the logger writes what is logged after this training batch."""
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return self.global_step != self._logged_step and self.global_step % max(interval, 1) == 0

    def check_causality(self) -> None:
        """Makes sure that the model sees nothing of what it is to predict.

        Raises:
            UserError: it does.
        """

    def on_fit_start(self) -> None:
        """Lets no model train that sees what it must not …"""
        self.check_causality()

    def on_validation_start(self) -> None:
        """… nor be judged that has learned to. Logs what came since, for a checkpoint to have all of the run in it."""
        self.check_causality()
        self._log_metrics("train")

    def on_train_start(self) -> None:
        """Takes up gradients, which the Trainer has zeroed since they were loaded.

        Ends a run at once whose checkpoint says that it has diverged: it was killed on its way to the end.
        """
        for name, gradient in self._loaded_gradients.items():
            parameter = self.get_parameter(name)
            parameter.grad = gradient.to(parameter.device)
        self._loaded_gradients = {}
        if self.diverged:
            self.trainer.should_stop = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the training means at the steps that the logger writes, and at no other: logging costs time."""
        if self.logs_now:
            self._logged_step = self.global_step
            self._log_metrics("train")

    def on_train_epoch_end(self) -> None:
        """Logs what came since."""
        self._log_metrics("train")

    def on_validation_epoch_end(self) -> None:
        """Logs the means of the epoch."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Logs the means of the split."""
        self._log_metrics("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the task and its data are, the validation metrics of the moment, and what led there: plain data."""
        checkpoint["model_class"] = class_name(type(self))
        if (data := getattr(self.trainer, "datamodule", None)) is not None:
            checkpoint["data_class"] = class_name(type(data))
        metrics = self.trainer.callback_metrics
        checkpoint["metrics"] = {name: float(value) for name, value in metrics.items() if name.startswith("val/")}
        checkpoint["history"], checkpoint["diverged"] = self.history, self.diverged
        checkpoint["processes"] = gathered({"running": self.metric_state, "gradients": self._gradients}, self.trainer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on with history, running means and gradients where they were."""
        self.history, self.diverged = [*checkpoint.get("history", ())], checkpoint.get("diverged")
        processes = checkpoint.get("processes", ())
        own = processes[self.global_rank] if self.global_rank < len(processes) else {}
        self.load_metric_state(own.get("running", {}))
        self._loaded_gradients = own.get("gradients", {})

    @property
    def _gradients(self) -> dict[str, Tensor]:
        """Of the batches whose step is still to come, where several make one."""
        if self.trainer.accumulate_grad_batches == 1:
            return {}
        return {name: weight.grad for name, weight in self.named_parameters() if weight.grad is not None}

    @property
    def metric_state(self) -> dict[str, dict[str, Any]]:
        """The sums of the training means that are not logged yet, by the means' names."""
        means = {name: self._metric("train", name) for name in self.metric_names}
        return {name: metric.metric_state for name, metric in means.items() if metric.update_called}

    def load_metric_state(self, running: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Makes such sums the task's own."""
        for name in self.metric_names:
            metric = self._metric("train", name)
            metric.reset()
            if name in running:
                metric.update(torch.zeros((), device=metric.device), 0)
            for part, number in running.get(name, {}).items():
                setattr(metric, part, number.to(metric.device))

    def _step(self, stage: str, batch: Any) -> dict[str, Tensor]:
        measured, weight = self.compute_metrics(batch), self.num_predictions(batch)
        for name in self.metric_names:
            self._metric(stage, name).update(measured[name].detach(), weight)
        return measured

    def _log_metrics(self, stage: str) -> None:
        for name, mean in self._means(stage).items():
            self.record(name, mean, prog_bar=stage != "test")

    def _means(self, stage: str) -> dict[str, Tensor]:
        """The means of a stage that something was added to, which begin anew."""
        means = {}
        for name, metric in self.metrics.items():
            assert isinstance(metric, Metric)
            if name.startswith(f"{stage}/") and metric.update_called:
                means[name] = metric.compute()
                metric.reset()
        return means

    def record(self, name: str, value: float | Tensor, prog_bar: bool = False) -> None:
        """Logs a metric; while training it becomes part of the history, and a loss without end is the end."""
        self.log(name, torch.as_tensor(value, dtype=EXACT), prog_bar=prog_bar)
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.remember(name, float(value), self.global_step)
            self.trainer.should_stop |= self.diverged is not None

    def remember(self, name: str, value: float, step: int) -> None:
        """Makes a metric part of the history; a loss that is no finite number says that the run has diverged."""
        if not self.history or self.history[-1]["step"] != step:
            remember(self.history, {"step": step, "seconds": self.seconds})
        self.history[-1][name] = value
        if name.endswith("/loss") and not isfinite(value):
            self.diverged = self.diverged or f"{name} is {value} at step {step}"

    def _metric(self, stage: str, name: str) -> Metric:
        metric = self.metrics[f"{stage}/{name}"]
        assert isinstance(metric, Metric)
        return metric


def class_name(cls: type) -> str:
    """What a checkpoint calls a class: one of kvt's by its name, any other by its import path."""
    return cls.__name__ if cls.__module__.startswith("kvt.") else f"{cls.__module__}.{cls.__qualname__}"


def gathered(own: dict[str, Any], trainer: L.Trainer) -> list[dict[str, Any]]:
    """What each process has of its own, by rank."""
    if trainer.world_size == 1:
        return [own]
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, own)
    return parts


def every_step(optimizer: Optimizer, schedule: LRScheduler) -> OptimizerLRScheduler:
    """What `configure_optimizers` returns for a schedule that moves with every step, not with every epoch."""
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def adam(task: Task, **settings: Any) -> Adam:
    """Adam at the task's `lr`, one kernel for all parameters where their device has one; `settings` are torch's."""
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in task.parameters())
    optimizer = Adam(task.parameters(), lr=task.hparams["lr"], fused=fused, **settings)
    # it could undo the scaling of float16 gradients itself; where it says so, Lightning refuses to clip them
    optimizer._step_supports_amp_scaling = False
    return optimizer


def adam_with_cosine(task: Task) -> OptimizerLRScheduler:
    """Adam at the task's `lr`, times a cosine over all steps of the run with `warmup` steps of linear warm-up."""
    optimizer = adam(task)
    factor = cosine_warmup(task.hparams["warmup"], task.total_steps)
    return every_step(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


class Classification(Task):
    """Cross-entropy and accuracy of one class a prediction; a batch is (inputs, targets)."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "acc")
    monitor = "val/acc"
    mode = "max"

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss and accuracy over all targets of the batch."""
        inputs, targets = batch
        logits = self(inputs)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # halves would round what is reported
        loss = nn.functional.cross_entropy(exact.flatten(0, -2), targets.flatten())
        right = (logits.argmax(-1) == targets).sum(dtype=exact.dtype)
        return {"loss": loss, "acc": right / self.num_predictions(batch), "logits": logits}

    def num_predictions(self, batch: tuple[Tensor, Tensor]) -> int | Tensor:
        """The number of targets."""
        return batch[1].numel()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """The most probable class of every prediction, its probability, and the target."""
        inputs, targets = batch
        probability, prediction = torch.softmax(self(inputs).float(), -1).max(-1)
        return {"target": targets, "prediction": prediction, "probability": probability}
