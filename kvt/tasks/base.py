"""`Task`, the base class of all tasks, and its subclass `Classification`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from inspect import isabstract, isclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from safetensors.torch import save
from torch import Tensor, nn

from kvt.models.losses import Losses, Predictions, cross_entropy
from kvt.system import UserError, import_class, require_positive, user_path, write_atomically
from kvt.tasks.metrics import ACC, ACCUM_DTYPE, LOSS, Mean, Metric
from kvt.tasks.optimizers import make_optimizer
from kvt.tasks.schedules import require_schedule, with_schedule

Spec = dict  # without a type of values: with one, jsonargparse would parse strings in the dict as YAML
"""`TaskData.spec`: plain values that the model needs from the data."""
MODEL, SETTINGS = "model.safetensors", "config.json"  # files that `Task.save_pretrained` writes


class Task(L.LightningModule, ABC):
    """A LightningModule with a model, its loss, its metrics and its optimiser.

    A subclass sets `self.model`, which `forward` calls, and implements `compute_metrics` and `num_predictions`. The
    learning rate is a constant 1e-3, unless the subclass passes arguments of `set_rate` to `super().__init__`.

    Validation and test metrics are computed over all predictions of an epoch, training metrics over the steps since the
    last log. Training metrics are logged every `log_every_n_steps` steps, before a validation, and after an epoch.
    """

    unit: ClassVar[str] = "predictions"  # the unit of `num_read`, such as "images" or "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("loss", better="less"),)
    monitor: ClassVar[str] = "val/loss"  # the metric by which the best checkpoint is chosen
    must_match: ClassVar[tuple[str, ...]] = ()  # keys whose values in `spec` must agree in data and model, e.g. "vocab"
    lr: float = 1e-3
    warmup: int = 0  # steps of linear warm-up
    schedule: str = "constant"  # a key of `kvt.tasks.schedules.SCHEDULES`
    model: nn.Module

    def __init__(self, spec: Spec | None = None, **rate: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # also saves the arguments of the subclass
        self.monitored()
        self.metric_notes: dict[str, str] = {}  # notes for result.json, by topic
        self.logged_step = 0  # the training step after which `on_train_batch_end` last logged
        self.run_config: dict[str, Any] | None = None  # the content of config.yaml; None outside a run of kvt
        if rate:  # jsonargparse follows **kwargs to this call: the arguments of `set_rate` become flags
            self.set_rate(**rate)

    def __setattr__(self, name: str, value: Any) -> None:
        """Skip nn.Module's slow checks if a string or None replaces a value. Every Lightning hook sets such values."""
        if name in self.__dict__ and isinstance(value, str | None):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @classmethod
    def monitored(cls) -> Metric:
        """Return the metric that `monitor` names; raise UserError if `metrics` lacks it, or if its `better` is None."""
        name = cls.monitor.partition("/")[2]
        found = next((metric for metric in cls.metrics if metric.name == name), None)
        if found is None or found.better is None:
            raise UserError(f"{cls.__name__}.monitor is {cls.monitor}: metrics needs Metric({name!r}, better=…)")
        return found

    @cached_property
    def means(self) -> dict[str, Mean]:
        """Running means since the last log, by names such as "val/loss". In a plain dict, they are not submodules."""
        shapes = {name: (len(bins),) for name, bins in self.bins().items()}
        averaged = [(stage, m.name) for m in self.metrics for stage in m.stages if m.how != "recorded"]
        with self.device:
            return {f"{stage}/{name}": Mean(*shapes.get(name, ())) for stage, name in averaged}

    @property
    def attn(self) -> str:
        """The name or import path of the attention; if the task has no argument `attn`, the name of the task class."""
        return str(self.hparams.get("attn", type(self).__name__))

    @property
    def optimizer_config(self) -> dict[str, Any] | None:
        """The entry "optimizer" of `run_config`, such as {"class_path": …, "init_args": …}; None if there is none."""
        return (self.run_config or {}).get("optimizer")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def set_rate(self, lr: float = 1e-3, warmup: int = 0, schedule: str = "constant") -> None:
        """Set the learning rate, its warm-up and its schedule; raise UserError if the task does not allow a value.

        Args:
            lr: learning rate.
            warmup: number of training steps of linear warm-up; must be 0 for one_cycle and multistep, and above 0 for
                inverse_sqrt and noam.
            schedule: learning-rate schedule, a key of `kvt.tasks.schedules.SCHEDULES`.
        """
        require_positive(lr=lr)
        require_schedule(self, schedule, warmup)
        self.lr, self.warmup, self.schedule = lr, warmup, schedule

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return with_schedule(self, make_optimizer(self))

    @abstractmethod
    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        """Return a dict with "loss" and the other `metrics` of a batch; entries with other names are not logged.

        The loss is a scalar tensor. Any other metric is a scalar tensor (the mean over the predictions of the batch) or
        a pair of a sum and a divisor. Sums and divisors of all batches are added up before the division. For a metric
        with `bins`, sum and divisor have one entry per bin. For a metric with `how="exp"`, the dict has its logarithm.
        The dict has no metrics with `how="recorded"`, and may have some metrics in eval mode only.
        """

    def predictions(self, batch: Any) -> Predictions:
        """Return the `Predictions` of a batch, from which `losses` computes the cross-entropy."""
        raise NotImplementedError

    def losses(self, batch: Any, smoothing: float = 0.0) -> Losses:
        """Return the `Losses` of a batch, computed from `predictions` with label smoothing."""
        return cross_entropy(self.predictions(batch), smoothing)

    @abstractmethod
    def num_predictions(self, batch: Any) -> int | Tensor:
        """Return the number of predictions in a batch."""

    def num_read(self, batch: Any) -> int | Tensor:
        """Return the size of a batch in `unit`, for the training speed; default: `num_predictions`."""
        return self.num_predictions(batch)

    def bins(self) -> Mapping[str, Sequence[int]]:
        """Return a dict that maps each metric name with {} to the numbers that replace {}, one for each bin."""
        return {}

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` for a batch."""
        return (batch[0],)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]] | None:
        """Return row and column labels of a layer's attention map for one example; None if there are no labels."""
        return None

    def overlay(self, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a picture, uint8 (H, W, C), and the weights that one token gives its patches, (heads, rows, columns).

        `weights` is the attention map of a layer for one example, (heads, N, N). The last rows · columns of the
        N tokens are the patches, row by row. Return None if the task has no picture.
        """
        return None

    def caption(self, outputs: Any, batch: Any) -> str:
        """Return a caption for the attention maps of an example; `outputs` is the result of `forward`."""
        return ""

    def sample(self) -> str | None:
        """Return a text that the model generates, as Markdown for TensorBoard; None if the model generates no text."""
        return None

    def check_causality(self) -> None:
        """Raise UserError if an output depends on a token that the model must not use; default: check nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors, which has each tied weight once, and config.json to a folder."""
        weights: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, weight in self.state_dict(keep_vars=True).items():
            if (earlier := first.setdefault(id(weight), name)) == name:
                weights[name] = weight.detach().contiguous()
            else:
                tied[name] = earlier
        spec = {"spec": self.hparams.get("spec")}
        content = {"config": {"model": as_config(self)}, "hyper_parameters": spec, "tied": tied}
        out = user_path(folder)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / MODEL, save(weights, {"format": "pt"}))
        write_atomically(out / SETTINGS, json.dumps(content, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path, attn: str | None = None) -> Self:
        """Return the task that `save_pretrained` has written into a folder, in eval mode.

        `attn` is the import path of your own attention class, if the task uses one. Raises UserError if the folder
        holds no task of this class, or if the task's attention is neither kvt's nor `attn`.
        """
        from kvt.run.load_checkpoint import Checkpoint  # imported here, because kvt.run imports this module

        own = None if cls.__module__.startswith("kvt.") else class_path(cls)
        return Checkpoint(user_path(folder), {"attn": attn, "model": own}).load_task(cls)

    def setup(self, stage: str) -> None:
        """Raise UserError if data and model differ in an entry of `spec` that `must_match` names, such as "vocab"."""
        theirs = getattr(getattr(self.trainer, "datamodule", None), "spec", None) or {}
        for name in self.must_match:
            if theirs and theirs.get(name) != self.hparams["spec"].get(name):
                made = f"{type(self).__name__} was made with another {name} than the data"
                raise UserError(f"{made}: use data with the {name} of the model")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return a dict of columns of predictions.csv; default: "target" is batch[1], "prediction" is the output."""
        return {"target": batch[1], "prediction": self(*self.inputs(batch))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("train", batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        return self._step("test", batch)

    @property
    def logs_now(self) -> bool:
        """Whether `on_train_batch_end` will log now. It logs a step once, even if the step has several batches."""
        interval = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        return self.global_step != self.logged_step and self.global_step % interval == 0

    def on_train_start(self) -> None:
        self.check_causality()
        made = self.trainer.optimizers[0]
        if (asked := self.optimizer_config) and not isinstance(made, resolve_name(asked["class_path"])):
            remedy = "call make_optimizer in its configure_optimizers, or drop the flag"
            raise UserError(f"--optimizer: {type(self).__name__} makes its own optimiser: {remedy}")
        for one in self.trainer.optimizers:
            if hasattr(one, "train") and hasattr(one, "eval"):
                modes = "kvt does not switch its weights from train() to eval()"
                raise UserError(f"{type(one).__name__}: {modes}: choose an optimiser without modes")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients. If an epoch's last step accumulates fewer batches than usual, average over those only."""
        batches, usual = self.trainer.num_training_batches, self.trainer.accumulate_grad_batches
        if (rest := batches % usual) and self.trainer.fit_loop.batch_idx >= batches - rest:
            loss = loss * (usual / rest)
        super().backward(loss, *args, **kwargs)

    def on_validation_start(self) -> None:
        self.check_causality()  # some models use later tokens only after some training
        self._log_metrics("train")  # now, so that the next checkpoint contains all metrics so far

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logs_now:
            self.logged_step = self.global_step
            self._log_metrics("train")

    def on_train_epoch_end(self) -> None:
        self._log_metrics("train")

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save `run_config` as "config"; outside a run of kvt, classes and arguments of task and data, and the seed."""
        data = getattr(self.trainer, "datamodule", None)
        checkpoint["config"] = self.run_config or {
            "model": as_config(self),
            **({} if data is None else {"data": as_config(data), "seed_everything": data.hparams.get("seed", 0)}),
        }

    def record(self, name: str, value: float | Tensor, prog_bar: bool = False) -> None:
        """Log a number, and pass it to callbacks that have `on_record`. Loggers get the first process's number."""
        self.log(name, torch.as_tensor(value, dtype=ACCUM_DTYPE), prog_bar=prog_bar)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_record"):
                callback.on_record(self.trainer, name, float(value))

    def measure(self, stage: str, computed: Mapping[str, Any], weight: int | Tensor) -> None:
        """Add `computed`, the result of `compute_metrics`, to running means; `weight` is the number of predictions."""
        for metric, mean in self._means(stage):
            value = computed.get(metric.name)
            if isinstance(value, Tensor):  # converted first, because half precision would overflow
                mean.update(value.detach().to(ACCUM_DTYPE) * weight, weight)
            elif value is not None:
                mean.update(*value)

    def _means(self, stage: str) -> Iterator[tuple[Metric, Mean]]:
        for metric in self.metrics:
            if (mean := self.means.get(f"{stage}/{metric.name}")) is not None:
                yield metric, mean if mean.device == self.device else mean.to(self.device)

    def _step(self, stage: str, batch: Any) -> dict[str, Any]:
        computed = self.compute_metrics(batch)
        self.measure(stage, computed, self.num_predictions(batch))
        return computed

    def _log_metrics(self, stage: str) -> None:
        """Log the running means of a stage that have been updated, and reset them."""
        logged: dict[str, Tensor] = {}
        for metric, mean in self._means(stage):
            if not mean.update_called:
                continue
            value = mean.compute().exp() if metric.how == "exp" else mean.compute()
            numbers = {metric.name: value}
            if bins := self.bins().get(metric.name):
                of_bins = zip(bins, value.view(-1), strict=True)
                numbers = {metric.name.format(bin): number for bin, number in of_bins if not number.isnan()}
                numbers = numbers if len(numbers) > 1 else {}  # a single bin would repeat the mean of all predictions
            logged |= numbers
            mean.reset()
        for name, number in logged.items():
            self.record(f"{stage}/{name}", number, prog_bar=stage != "test")
        if logged and self.trainer.state.fn == TrainerFn.FITTING:  # loggers show this step; Lightning's is one less
            self.log("step", torch.as_tensor(self.global_step, dtype=ACCUM_DTYPE))


def class_path(cls: type) -> str:
    """Return the import path of a class; for a class of kvt, the path in `kvt.tasks`."""
    return f"kvt.tasks.{cls.__name__}" if cls.__module__.startswith("kvt.") else f"{cls.__module__}.{cls.__qualname__}"


def as_config(made: Any) -> dict[str, Any]:
    """Return {"class_path": …, "init_args": …} for a task or its data, without `spec`, `seed` and `content`."""
    given_by_run = ("spec",) if isinstance(made, Task) else ("seed", "content")
    other = (*given_by_run, "_instantiator", "_class_path")  # LightningCLI adds the last two
    given = {name: value for name, value in made.hparams.items() if name not in other}
    return {"class_path": class_path(type(made)), "init_args": given}


@cache
def known_classes() -> dict[str, type[Any]]:
    """Return a dict from names to the concrete task and data classes of kvt."""
    return {
        name: cls
        for name, cls in vars(import_module("kvt.tasks")).items()
        if isclass(cls) and not isabstract(cls) and cls is not Classification
    }


def find_class(name: str, flag: str, base: type[Any]) -> type[Any]:
    """Return the subclass of `base` with this name in kvt or this import path; raise UserError if there is none."""
    known = {known: cls for known, cls in known_classes().items() if issubclass(cls, base)}
    ours = known.get(name.rpartition(".")[2] if name.startswith("kvt.") else name)
    return ours or import_class(name, f"--{flag}", base, [*known, "my_package.my_module.MyClass"])


class Classification(Task):
    """A task with the metrics loss (cross-entropy) and accuracy. A batch is (inputs, targets, …)."""

    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, ACC)
    monitor = "val/acc"
    smoothing: float = 0.0  # label smoothing in training

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        """Return a dict: "loss", "acc", "logits" (None if computed in chunks) and "found" (the result of `losses`)."""
        found = self.losses(batch, self.smoothing if self.training else 0.0)
        right = found.right.sum(dtype=found.loss.dtype)
        return {"loss": found.loss, "acc": right / self.num_predictions(batch), "logits": found.logits, "found": found}

    def predictions(self, batch: Any) -> Predictions:
        return Predictions(self(batch[0]), batch[1])

    def num_predictions(self, batch: Any) -> int | Tensor:
        return batch[1].numel()

    def caption(self, outputs: Tensor, batch: Any) -> str:
        """Return the true and the predicted class if the example has one prediction, else ""."""
        if batch[1].numel() > 1:
            return ""
        true, predicted = (self.class_title(int(label)) for label in (batch[1], outputs.argmax()))
        return f"true {true}, predicted {predicted}"

    def class_title(self, label: int) -> str:
        """Return the name of a class; default: the number of the class."""
        return str(label)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the most probable class of each prediction, int64: the argmax over the logits' last dimension."""
        inputs = inputs.to(self.device)
        return self(inputs.to(self.dtype) if inputs.is_floating_point() else inputs).argmax(-1)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return a dict of the targets, the most probable classes, and the probabilities of these classes."""
        inputs, targets = batch
        probability, prediction = torch.softmax(self(inputs).float(), -1).max(-1)
        return {"target": targets, "prediction": prediction, "probability": probability}
