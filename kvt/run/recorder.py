"""`Recorder`, the callback that keeps the history and state of a run in the checkpoints, for exact resuming."""

from collections.abc import Mapping
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from kvt.run.lightning_internals import OutsideSteps, step_plateau_schedules
from kvt.tasks import Task

Row = dict[str, float]
"""{"step": …, "seconds": …, metric: …}: the seconds of training until the step, and metrics logged at this step."""
MAX_ROWS = 2**15  # largest number of rows in the history, which every checkpoint contains


class Recorder(OutsideSteps, Callback):
    """A callback that keeps the history of a run, its training time, and the state accumulated since the last log.

    * The history has a row for each step at which the run logs metrics of training or validation. A loss that is not
      finite ends the run.
    * The learning rate and the norm of the gradients are logged with the training metrics.
    * The training time excludes validation, pictures and checkpoints. The callback logs `train/seconds` and
      `train/<unit>_per_second`.
    * The accumulated state has running means, accumulated gradients, and the metrics that the Trainer passes to
      callbacks and schedulers. A checkpoint has the state of all processes, by rank.

    Args:
        resumes: whether this process resumes a run. A resumed run ends if `EarlyStopping` had stopped the run before.
    """

    def __init__(self, resumes: bool = False) -> None:
        self.resumes = resumes
        self.rows: list[Row] = []
        self.diverged: str | None = None  # name, value and step of the first loss that was not finite
        self.seconds = 0.0
        self.count = 0  # units of the task, such as tokens, that all processes had read at the last log
        self._own_count: int | Tensor = 0  # units that this process has read since the last log; on the device
        self.has_trained = False  # whether this process has done a training step
        self._since: float | None = None  # None while the clock is stopped
        self._gradients: dict[str, Tensor] = {}
        self._callback_metrics: dict[str, Tensor] = {}
        self._had_to_stop = False  # trainer.should_stop in the loaded checkpoint
        self._step: dict[str, float | Tensor] = {}  # learning rate and gradient norm to log after this step

    @property
    def rate(self) -> float:
        """The training speed so far, in units of the task, such as images or tokens, per second."""
        return self.count / self.seconds if self.seconds else 0.0

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._trainer, self._task = trainer, pl_module

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore gradients and metrics, which the Trainer resets after it has loaded a checkpoint.

        `EarlyStopping` and `ReduceLROnPlateau` read the metrics at the end of an epoch, and a checkpoint may be written
        between a validation and the end of the epoch. A resumed run ends if it had diverged or had stopped early.
        """
        for name, gradient in self._gradients.items():
            parameter = pl_module.get_parameter(name)
            parameter.grad = gradient.to(parameter)
        self._gradients = {}
        device = trainer.strategy.root_device
        trainer.callback_metrics.update({name: value.to(device) for name, value in self._callback_metrics.items()})
        trainer.should_stop |= self.diverged is not None or (self.resumes and self._had_to_stop)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._since = perf_counter() if self._since is None else self._since

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_trained = True
        self._own_count += pl_module.num_read(batch)
        if pl_module.logs_now:
            self._add_up_counts()
            self._tick()
            for name, value in self._step.items():
                pl_module.record(name, value)
            self._step = {}
            pl_module.log("train/seconds", self.seconds)
            pl_module.log(f"train/{pl_module.unit}_per_second", self.rate, prog_bar=True)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """Before a step with a log, keep the learning rate, and the norm of the gradients before clipping."""
        if (trainer.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            self._step = {"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm}

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_clock(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_clock(trainer)
        step_plateau_schedules(trainer)

    def add(self, name: str, value: float, step: int) -> None:
        """Add a metric to the row of a step."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows = thinned(self.rows) if len(self.rows) >= MAX_ROWS else self.rows
            self.rows.append({"step": step, "seconds": self.seconds})
        self.rows[-1][name] = value
        if name.endswith("/loss") and not isfinite(value):
            self.diverged = self.diverged or f"{name} is {value} at step {step}"

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the metrics to the checkpoint if there was a validation at this step."""
        now = self.rows[-1] if self.rows and self.rows[-1]["step"] == trainer.global_step else {}
        validated = any(name.startswith("val/") for name in now)
        metrics = trainer.callback_metrics.items() if validated else ()
        checkpoint["metrics"] = {name: float(value) for name, value in metrics if name.startswith("val/")}

    def state_dict(self) -> dict[str, Any]:
        self._add_up_counts()
        self._tick()
        return {
            **{"rows": self.rows, "diverged": self.diverged, "seconds": self.seconds, "count": self.count},
            **{"logged_step": self._task.logged_step, "processes": self._processes()},
            "should_stop": self._trainer.should_stop,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.diverged = [*state_dict["rows"]], state_dict["diverged"]
        self.seconds, self.count = state_dict["seconds"], state_dict["count"]
        self._task.logged_step = state_dict["logged_step"]
        self._had_to_stop = state_dict.get("should_stop", False)
        processes, rank = state_dict["processes"], self._trainer.global_rank
        own = processes[rank] if rank < len(processes) else {}
        load_metric_state(self._task, own.get("metrics", {}))
        self._gradients = own.get("gradients", {})
        self._callback_metrics = own.get("callback_metrics", {})

    def on_record(self, name: str, value: float) -> None:
        """Add a metric to the history. `Task.record` calls this method."""
        if self._trainer.state.fn == TrainerFn.FITTING and not self._trainer.sanity_checking:
            self.add(name, value, self._trainer.global_step)
            self._trainer.should_stop |= self.diverged is not None

    def _processes(self) -> list[dict[str, Any]]:
        """Return a list by rank of the running means, accumulated gradients and metrics of every process."""
        weights = self._task.named_parameters() if self._trainer.accumulate_grad_batches > 1 else ()
        gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
        shown = {name: value.detach().cpu() for name, value in self._trainer.callback_metrics.items()}
        own = {"metrics": metric_state(self._task), "gradients": gradients, "callback_metrics": shown}
        processes: list[Any] = [own] * self._trainer.world_size
        if self._trainer.world_size > 1:
            torch.distributed.all_gather_object(processes, own)
        return processes

    def _stop_clock(self, trainer: Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # work that is queued on the GPU belongs to training
        self._add_up_counts()
        self._tick()
        self._since = None

    def _add_up_counts(self) -> None:
        strategy = self._trainer.strategy
        own = torch.as_tensor(self._own_count, device=strategy.root_device)
        self.count += int(strategy.reduce(own, reduce_op="sum"))
        self._own_count = 0

    def _tick(self) -> None:
        if self._since is not None:
            now = perf_counter()
            self.seconds += now - self._since
            self._since = now


def thinned(rows: list[Row]) -> list[Row]:
    """Return at most half of the rows: of rows with the same metrics, the first in each interval of 2, 4, 8 … steps."""
    kept, steps = rows, 1
    while len(kept) > len(rows) // 2:
        steps *= 2
        first: dict[Any, Row] = {}
        for row in rows:
            first.setdefault((row["step"] // steps, *row), row)
        kept = [*first.values()]
    return kept


def metric_state(task: Task) -> dict[str, dict[str, Any]]:
    """Return a dict that maps a metric to the sum and count of its running mean since the last log of training."""
    means = {name: task.means[f"train/{name}"] for name in _trained(task)}
    return {name: mean.metric_state for name, mean in means.items() if mean.update_called}


def load_metric_state(task: Task, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the running means from the result of `metric_state`."""
    for name in _trained(task):
        mean = task.means[f"train/{name}"]
        mean.reset()
        if name in state:
            mean.update(torch.zeros((), device=mean.device), 0)
        for part, number in state.get(name, {}).items():
            setattr(mean, part, number.to(mean.device))


def _trained(task: Task) -> list[str]:
    return [name.removeprefix("train/") for name in task.means if name.startswith("train/")]
