"""The base classes of all tasks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from importlib import import_module
from inspect import isabstract, isclass
from itertools import chain
from pkgutil import resolve_name
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from kvt.models.losses import Losses, Predictions, Teacher, cross_entropy
from kvt.system.errors import UserError, import_class, require_positive
from kvt.tasks.metrics import ACC, ACCUM_DTYPE, LOSS, Mean, Metric
from kvt.tasks.optimizers import Together, make_optimizer
from kvt.tasks.schedules import require_schedule, with_schedule


class Task(L.LightningModule, ABC):
    """A LightningModule with a model, its loss, its metrics and its optimiser.

    A subclass sets `self.model`, which `forward` calls, and implements `compute_metrics` and `num_predictions`.

    The optimiser is that of `make_optimizer`, unless the subclass overrides `configure_optimizers`. The learning rate
    is constant unless the subclass calls `set_rate`, or passes its arguments to `super().__init__(spec, **rate)`.

    A metric of an epoch is the mean over all predictions of the epoch, regardless of the batch size. A training metric
    is the mean over the training steps since the last log. The Trainer's `log_every_n_steps` is the interval.
    """

    unit: ClassVar[str] = "predictions"  # the unit of `num_read`, such as "images" or "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("loss", better="less"),)  # all metrics of the task
    monitor: ClassVar[str] = "val/loss"  # the metric that chooses the best checkpoint
    required_spec: ClassVar[tuple[str, ...]] = ()  # keys of the data's `spec` that the model needs
    must_match: ClassVar[tuple[str, ...]] = ()  # keys of `spec` that must be equal in data and model, such as "vocab"
    lr: float = 1e-3  # learning rate
    warmup: int = 0  # steps of linear warm-up
    schedule: str = "constant"  # a key of `kvt.tasks.schedules.SCHEDULES`
    model: nn.Module
    means: MutableMapping[str, Mean]  # running means by name, such as "val/loss", since they were last recorded

    def __init__(self, spec: Mapping[str, Any] | None = None, **rate: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # includes arguments of the subclass
        if missing := [key for key in self.required_spec if key not in (spec or {})]:
            raise UserError(f"--model {type(self).__name__} does not fit --data: the data spec lacks {missing}")
        self.monitored()
        shapes = {name: (len(bins),) for name, bins in self.bins().items()}
        averaged = [(stage, m.name) for m in self.metrics for stage in m.stages if m.how != "recorded"]
        means = {f"{stage}/{name}": Mean(*shapes.get(name, ())) for stage, name in averaged}
        self.means = nn.ModuleDict(means)  # type: ignore[assignment]
        self.metric_notes: dict[str, str] = {}  # notes about metrics for a reader of the result
        self.logged_step = 0  # the training step at which training metrics were last logged
        self.optimizer_config: dict[str, Any] | None = None  # class_path and init_args; None: Adam
        self.optimizer_mode = "train"  # or "eval", for optimisers with modes, such as schedule-free optimisers
        self.teachers: tuple[Task, ...] = ()  # at most one; a tuple, so that it is no submodule and in no checkpoint
        self.taught: dict[str, Any] = {}  # the settings of the teacher and the hash of its weights, for checkpoints
        if rate:  # a subclass that passes on **kwargs has the arguments of `set_rate` as flags
            self.set_rate(**rate)

    @classmethod
    def monitored(cls) -> Metric:
        """Return the metric of `monitor`; raise UserError if it is not in `metrics` or has no `better`."""
        name = cls.monitor.partition("/")[2]
        found = next((metric for metric in cls.metrics if metric.name == name), None)
        if found is None or found.better is None:
            raise UserError(f"{cls.__name__}.monitor is {cls.monitor}: metrics needs Metric({name!r}, better=…)")
        return found

    @property
    def attn(self) -> str:
        """The name of the attention, or the name of the class if the task has no argument `attn`."""
        return str(self.hparams.get("attn", type(self).__name__))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def set_rate(self, lr: float = 1e-3, warmup: int = 0, schedule: str = "constant") -> None:
        """Set the learning rate and its schedule; raise UserError if a value is not allowed.

        Args:
            lr: learning rate.
            warmup: number of training steps of linear warm-up; must be 0 for one_cycle and multistep.
            schedule: learning-rate schedule, a key of `kvt.tasks.schedules.SCHEDULES`.
        """
        require_positive(lr=lr)
        require_schedule(self, schedule, warmup)
        self.lr, self.warmup, self.schedule = lr, warmup, schedule

    def learn_from(self, teacher: "Task", temperature: float = 1.0, weight: float = 1.0) -> None:
        """Add weight · T² · KL(teacher ‖ task) to the training loss, in nats, as a mean over predictions.

        The two distributions are softmax(logits / T), where T is the temperature (Hinton et al. 2015). Teacher and task
        get the same batches, with the same masked tokens and crops. The teacher is in eval mode, and is not trained.
        """
        self.teachers = (teacher.eval().requires_grad_(False),)
        self.temperature, self.teacher_weight = temperature, weight

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return with_schedule(self, make_optimizer(self))

    @abstractmethod
    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        """Return a dict of the loss and the other `metrics` of a batch; it may have further outputs.

        A metric is either a tensor with one number, the mean over the predictions of the batch; or a pair of a sum and
        its divisor, which are added up over all batches before the division. For a metric with `bins`, sum and divisor
        have one entry per bin. A task whose loss is that of `losses`, and which returns the result of `losses` as
        "found", can learn from a teacher. A task may return some metrics in eval mode only.
        """

    def predictions(self, batch: Any) -> Predictions:
        """Return the logits of a batch, or the states and the head, and the right classes, for `losses`."""
        raise self._error("predictions must return kvt.models.losses.Predictions, for its losses and for a --teacher")

    def losses(self, batch: Any, smoothing: float = 0.0) -> Losses:
        """Return the cross-entropy of `predictions`. In training, the divergence from a `--teacher` is added."""
        teacher = None
        for one in self.teachers if self.training else ():
            with torch.no_grad():
                teacher = Teacher(one.predictions(batch), self.temperature, self.teacher_weight)
        return cross_entropy(self.predictions(batch), smoothing, teacher)

    @abstractmethod
    def num_predictions(self, batch: Any) -> int | Tensor:
        """Return the number of predictions in a batch."""

    def num_read(self, batch: Any) -> int | Tensor:
        """Return the size of a batch in `unit`, for the training speed; default: `num_predictions`."""
        return self.num_predictions(batch)

    def bins(self) -> Mapping[str, Sequence[int]]:
        """Return a dict from names of binned `metrics` to their bins, the numbers that replace {} in the name."""
        return {}

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` for a batch."""
        return (batch[0],)

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]] | None:
        """Return labels for the rows and the columns of a layer's attention map; None for no labels.

        Args:
            layer: name of the attention layer.
            inputs: the arguments of `forward` for one example.
        """
        return None

    def overlay(self, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a picture, uint8 (H, W, C), and attention weights to draw over it, (heads, rows, columns), or None.

        Args:
            weights: attention map of one layer for one example, (heads, N, N). The last tokens are the patches of the
                picture, row by row.
            inputs: the arguments of `forward` for this example.
        """
        return None

    def caption(self, outputs: Any, batch: Any) -> str:
        """Return a caption for the attention maps of an example; `outputs` is the result of `forward`."""
        return ""

    def sample(self) -> str | None:
        """Return a text that the model generates, as Markdown for TensorBoard; None if the task generates no text."""
        return None

    def check_causality(self) -> None:
        """Raise UserError if an output depends on a token that the model must not use."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def setup(self, stage: str) -> None:
        """Raise UserError if data and model differ in a key of `must_match`, so that ids have different meanings."""
        theirs = getattr(getattr(self.trainer, "datamodule", None), "spec", None) or {}
        for name in self.must_match:
            if theirs and theirs.get(name) != self.hparams["spec"].get(name):
                raise UserError(
                    f"{type(self).__name__} was made with another {name} than the data: use data with that {name}"
                )

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return columns of predictions.csv for a batch: by default batch[1] as target, and the output of `forward`."""
        return {"target": batch[1], "prediction": self(*self.inputs(batch))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("train", batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return self._step("test", batch)

    @property
    def logs_now(self) -> bool:
        """Whether the training metrics are logged after the present batch."""
        interval = max(self.trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        return self.global_step != self.logged_step and self.global_step % interval == 0

    def on_train_start(self) -> None:
        self.check_causality()
        for teacher in self.teachers:
            teacher.to(self.device, self.dtype)
        trained = chain.from_iterable(group["params"] for one in self.trainer.optimizers for group in one.param_groups)
        if {*map(id, self.parameters())}.isdisjoint(map(id, trained)):
            raise self._error("configure_optimizers must return an optimiser of the task's weights")
        made = self.trainer.optimizers[0]
        made = made.parts[0] if isinstance(made, Together) else made
        if (asked := self.optimizer_config) and not isinstance(made, resolve_name(asked["class_path"])):
            remedy = "call make_optimizer in its configure_optimizers, or drop the flag"
            raise UserError(f"--optimizer: {type(self).__name__} makes its own optimiser: {remedy}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._switch_optimizers("train")

    def on_train_end(self) -> None:
        self._switch_optimizers("eval")

    def on_validation_start(self) -> None:
        self._switch_optimizers("eval")
        self.check_causality()  # a leak may show only after some training
        self._log_metrics("train")  # before a checkpoint is written, so that it contains all metrics so far

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
        """Add the names of the task's and the data's class to the checkpoint, for `kvt.load`.

        If an optimiser has modes and is in mode train, the checkpoint's weights are those of mode eval. The weights of
        mode train are stored as "training_weights", since switching the mode and back may change their last bits.
        """
        if self.optimizer_mode == "train" and self._optimizers_with_modes() and "averaging_state" not in checkpoint:
            weights = _copies(checkpoint["state_dict"])
            self._switch_optimizers("eval")
            checkpoint |= {"state_dict": _copies(checkpoint["state_dict"]), "training_weights": weights}
            self._switch_optimizers("train")
            self.load_state_dict(weights)
        checkpoint["model_class"] = class_name(type(self))
        checkpoint["optimizer"] = self.optimizer_config
        checkpoint |= {"teacher": self.taught} if self.taught else {}
        if (data := getattr(self.trainer, "datamodule", None)) is not None:
            checkpoint["data_class"] = class_name(type(data))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the weights of the optimiser's mode train, if they are stored separately."""
        checkpoint["state_dict"] |= checkpoint.get("training_weights", {})

    def record(self, name: str, value: float | Tensor, prog_bar: bool = False) -> None:
        """Log a number, and pass it to callbacks that have a method `on_record`.

        With several processes, the first process's number is logged. If a metric that the task computes at the end of a
        stage differs between processes, a note says so.
        """
        own = {metric.name for metric in self.metrics if metric.how == "recorded"}
        if self.trainer.world_size > 1 and name.partition("/")[2] in own:
            of_all = self.all_gather(torch.as_tensor(value, dtype=ACCUM_DTYPE, device=self.device))
            if (of_all != of_all[0]).any():  # type: ignore[union-attr]
                self.metric_notes[name] = "of the first process alone, which has a part of the rows"
        self.log(name, torch.as_tensor(value, dtype=ACCUM_DTYPE), prog_bar=prog_bar)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_record"):
                callback.on_record(name, float(value))

    def measure(self, stage: str, computed: Mapping[str, Any], weight: int | Tensor) -> None:
        """Add the result of `compute_metrics` to the means of a stage; a single number counts `weight` times."""
        for metric, mean in self._means(stage):
            value = computed.get(metric.name)
            if isinstance(value, Tensor):  # converted before the product, which would overflow in half precision
                mean.update(value.detach().to(ACCUM_DTYPE) * weight, weight)
            elif value is not None:
                mean.update(*value)

    def _means(self, stage: str) -> Iterator[tuple[Metric, Mean]]:
        """Yield the metrics of a stage with their running means."""
        for metric in self.metrics:
            if (name := f"{stage}/{metric.name}") in self.means:
                yield metric, self.means[name]

    def _optimizers_with_modes(self) -> list[Any]:
        return [one for one in self.trainer.optimizers if hasattr(one, "train") and hasattr(one, "eval")]

    def _switch_optimizers(self, mode: str) -> None:
        """Call `train` or `eval` of optimisers with modes; a schedule-free optimiser then replaces the weights."""
        self.optimizer_mode = mode
        for optimizer in self._optimizers_with_modes():
            getattr(optimizer, mode)()

    def _step(self, stage: str, batch: Any) -> dict[str, Any]:
        computed, weight = self.compute_metrics(batch), self.num_predictions(batch)
        if self.teachers and "found" not in computed:
            raise self._error('compute_metrics must return "found", its self.losses(batch), to learn from a --teacher')
        numbers = [name for name, value in computed.items() if is_measured(value)]
        wanted = [metric.name for metric, _ in self._means(stage)]
        if missing := [name for name in ("loss", *wanted) if name not in numbers]:
            raise self._error(f"compute_metrics must return {missing[0]!r}, a tensor with one number, or a pair")
        declared = [metric.name for metric in self.metrics]
        if strange := [name for name in numbers if name not in declared]:
            remedy = f"add Metric({strange[0]!r}) to its metrics, {', '.join(declared)}"
            raise self._error(f"compute_metrics returns {strange[0]!r}, which is not logged: {remedy}")
        if not isinstance(weight, Tensor) and (not isinstance(weight, int) or weight < 1):
            raise self._error(f"num_predictions must return the number of predictions in a batch, not {weight!r}")
        self.measure(stage, computed, weight)
        return computed

    def _error(self, message: str) -> UserError:
        return UserError(f"{type(self).__name__}.{message}")

    def _log_metrics(self, stage: str) -> None:
        """Record and reset the running means of a stage that have been updated."""
        for metric, mean in self._means(stage):
            if not mean.update_called:
                continue
            value = mean.compute().exp() if metric.how == "exp" else mean.compute()
            numbers = {metric.name: value}
            if bins := self.bins().get(metric.name):
                of_bins = zip(bins, value.view(-1), strict=True)
                numbers = {metric.name.format(bin): number for bin, number in of_bins if not number.isnan()}
                numbers = numbers if len(numbers) > 1 else {}  # a single bin equals the mean over all
            for name, number in numbers.items():
                self.record(f"{stage}/{name}", number, prog_bar=stage != "test")
            mean.reset()


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def is_measured(value: Any) -> bool:
    """Return whether a value can be a metric of a batch: a tensor with one number, or a pair of sum and divisor."""
    return (isinstance(value, Tensor) and value.ndim == 0) or (isinstance(value, tuple) and len(value) == 2)


def class_name(cls: type) -> str:
    """Return the name of a class for checkpoints: the bare name for kvt's classes, else the import path."""
    return cls.__name__ if cls.__module__.startswith("kvt.") else f"{cls.__module__}.{cls.__qualname__}"


@cache
def known_classes() -> dict[str, type[Any]]:
    """Return the task and data classes that `kvt.tasks` imports, by bare name, as checkpoints name them."""
    return {
        name: cls
        for name, cls in vars(import_module("kvt.tasks")).items()
        if isclass(cls) and not isabstract(cls) and cls is not Classification
    }


def find_class(name: str, flag: str, base: type[Any]) -> type[Any]:
    """Return kvt's class with a bare name, or a user's class with an import path; it must derive from `base`."""
    known = known_classes()
    ours = known.get(name.rpartition(".")[2] if name.startswith("kvt.") else name)
    if ours and issubclass(ours, base):
        return ours
    names = [other for other, cls in known.items() if issubclass(cls, base)]
    return import_class(name, f"--{flag}", base, [*names, "my_package.my_module.MyClass"])


class Classification(Task):
    """Task with cross-entropy as loss, and accuracy as metric; a batch is (inputs, targets)."""

    metrics: ClassVar[tuple[Metric, ...]] = (LOSS, ACC)
    monitor = "val/acc"
    smoothing: float = 0.0  # of the targets, in training; a subclass sets it in `make_model`

    def compute_metrics(self, batch: Any) -> dict[str, Any]:
        """Return loss and accuracy over all targets, the logits, and what `losses` returned."""
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
        """Return the name of a class; default: its number."""
        return str(label)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the most probable class of every prediction, int64, for a batch of inputs as in `forward`."""
        inputs = inputs.to(self.device)
        return self(inputs.to(self.dtype) if inputs.is_floating_point() else inputs).argmax(-1)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the most probable class of every prediction, its probability, and the target."""
        inputs, targets = batch
        probability, prediction = torch.softmax(self(inputs).float(), -1).max(-1)
        return {"target": targets, "prediction": prediction, "probability": probability}
