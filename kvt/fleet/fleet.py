"""Many models of one shape trained as one."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion, OptimizerLRScheduler
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Optimizer

from kvt.fleet.alike import Member, overrides
from kvt.fleet.loader import Stack
from kvt.fleet.optimizer import clip_norms, join_optimizers, own_rates, split_optimizer
from kvt.fleet.randomness import OwnStreams, drawing_from
from kvt.system.errors import UserError
from kvt.tasks import Task
from kvt.tasks.base import EXACT
from kvt.training.callbacks import load_metric_state, metric_state


class Fleet(Task):
    """N tasks of one shape as one: their parameters stacked, their losses added, one optimiser for all.

    The gradient of Σᵢ lossᵢ by the parameters of member i is that of lossᵢ: each member takes the steps that it would
    take alone, with its own batches, rate, clipping and, on a processor, its own random numbers. In float64 the weights
    are the same up to rounding. In float32 they drift apart, for Adam divides a gradient by its size, however small,
    and turns its rounding into a step: by 4e-3 in single weights, from 6e-8, after 50 steps. On a
    GPU neither dropout nor augmentation is drawn from streams of the members' own: both differ between members, but are
    not what a member draws alone. Means are (N,), one a member. A member whose loss is no number any more spoils none
    but its own numbers.

    Args:
        members: runs that have come to where their training begins.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        first = members[0].model
        self.unit, self.metric_names = first.unit, first.metric_names  # type: ignore[misc]
        super().__init__({})
        self.members = members
        for metric in self.metrics.values():
            metric.add_state("total", torch.zeros(len(members), dtype=EXACT), dist_reduce_fx="sum")
        self._alone = tuple(_Measured(member.model) for member in members)  # a tuple: no parts of this module
        parameters, buffers = stack_module_state([*self._alone])
        self._names = {name: name.replace(".", "/") for name in [*parameters, *buffers]}  # no part's name has dots
        self.stacked = nn.ParameterDict(
            {self._names[name]: nn.Parameter(p.detach(), p.requires_grad) for name, p in parameters.items()}
        )
        self._buffer_names = [*buffers]
        for name, buffer in buffers.items():
            self.register_buffer(self._names[name], buffer, persistent=False)

    def save_hyperparameters(self, *args: Any, **settings: Any) -> None:
        """Saves none: each member has its own."""

    def compute_metrics(self, batch: Stack) -> dict[str, Tensor]:
        """The means of each member over its own batch, (N,) each."""
        one = self._alone[0].train(self.training)

        def alone(parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor], tensors: Any) -> Any:
            parts: dict[str, Tensor] = {**parameters, **buffers}
            measured = functional_call(one, parts, (tensors,))
            return measured, {name: parts[name] for name in buffers}  # it puts there what became of them

        own = self.training and self.device.type == "cpu"  # on a GPU, N small draws would cost what a fleet saves
        with OwnStreams(batch.streams) if own else nullcontext():
            both = vmap(alone, randomness="different")(self._weights(), self._own_buffers(), batch.tensors)
        measured: dict[str, Tensor]
        measured, buffers = both
        for name, buffer in buffers.items():
            setattr(self, self._names[name], buffer)
        return measured

    def num_predictions(self, batch: Stack) -> int | Tensor:
        """The number of predictions of one member: each has as many."""
        return self.members[0].model.num_predictions(tuple(tensor[0] for tensor in batch.tensors))

    def training_step(self, batch: Stack, batch_idx: int) -> Tensor:
        """The sum of the members' losses."""
        return super().training_step(batch, batch_idx).sum()

    def on_after_batch_transfer(self, batch: Stack, dataloader_idx: int) -> Stack:
        """Lets each member's data do to its batch what they do to it alone."""
        if not overrides(type(self.members[0].datamodule), "on_after_batch_transfer", L.LightningDataModule):
            return batch
        done = []
        for member, stream, *tensors in zip(self.members, batch.streams, *batch.tensors, strict=True):
            member.trainer.state.stage = self.trainer.state.stage
            with drawing_from(stream):
                done.append(member.datamodule.on_after_batch_transfer(tuple(tensors), dataloader_idx))
        return Stack(tuple(torch.stack(tensors) for tensors in zip(*done, strict=True)), batch.streams)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimiser where the members' stand, and their schedules."""
        first = dict(self._alone[0].named_parameters())
        optimizer = join_optimizers(self._optimizers, {first[name]: p for name, p in self._weights().items()})
        configs = [member.trainer.lr_scheduler_configs for member in self.members]
        if not any(configs):
            return optimizer
        if any(len(config) != 1 or config[0].reduce_on_plateau for config in configs):
            raise UserError("--fleet: takes one learning-rate schedule, which follows the steps alone")
        for member in self._optimizers:
            member.step()  # without gradients it does nothing; a schedule wants to have seen it
        schedules = Schedules(optimizer, [config[0].scheduler for config in configs])
        moves = {"interval": configs[0][0].interval, "frequency": configs[0][0].frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, **moves}}  # type: ignore[return-value]

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: Any | None) -> None:
        """Moves all schedules."""
        scheduler.step()  # type: ignore[call-arg]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """One step of all, each at its own rate."""
        with own_rates(self.optimizers().optimizer, self._optimizers):  # type: ignore[union-attr]
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of each member as they would be clipped alone."""
        if gradient_clip_algorithm == "value" or not gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_norms([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)

    def on_train_start(self) -> None:
        """Goes on with the running means of the members."""
        running = [metric_state(member.model) for member in self.members]
        for name, parts in running[0].items():
            running[0][name] = {**parts, "total": torch.stack([sums[name]["total"] for sums in running])}
        load_metric_state(self, running[0])

    def on_validation_end(self) -> None:
        """Lets every member see how it stands."""
        self._notify("on_validation_end")

    def on_train_epoch_end(self) -> None:
        """Logs what came since, and lets every member see how it stands."""
        super().on_train_epoch_end()
        self._notify("on_train_epoch_end")

    def on_test_epoch_end(self) -> None:
        """Hands each member its means."""
        means = self._pop_means("test")
        for n, member in enumerate(self.members):
            if member.to_test:
                member.take_test({name: float(mean[n]) for name, mean in means.items()})

    @torch.no_grad()
    def catch_up(self) -> None:
        """Brings the members to where the fleet is: weights, buffers, optimisers, running means, progress."""
        parts, progress = {**self._weights(), **self._own_buffers()}, self.trainer.fit_loop.state_dict()
        split_optimizer(self.optimizers().optimizer, self._optimizers)  # type: ignore[union-attr]
        for n, (alone, member) in enumerate(zip(self._alone, self.members, strict=True)):
            for name, tensor in chain(alone.named_parameters(), alone.named_buffers()):
                tensor.copy_(parts[name][n])
            member.trainer.fit_loop.load_state_dict(progress)
            sums = metric_state(self).items()
            load_metric_state(member.model, {name: {**means, "total": means["total"][n]} for name, means in sums})

    def on_train_end(self) -> None:
        """Leaves the members where each had come to its end alone."""
        self.catch_up()

    @torch.no_grad()
    def take_up(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Takes other weights, those of each member, with the buffers that are kept among them."""
        for name, tensor in chain(self._weights().items(), self._own_buffers().items()):
            own = name.removeprefix(_Measured.prefix)
            if own in weights[0]:
                tensor.copy_(torch.stack([theirs[own].to(tensor) for theirs in weights]))

    def _notify(self, hook: str) -> None:
        self.catch_up()
        for member in self.members:
            member.notify(hook)

    def _log_metrics(self, stage: str) -> None:
        means = self._pop_means(stage)
        if self.trainer.sanity_checking:
            return
        for n, member in enumerate(self.members):
            member.record({name: mean[n] for name, mean in means.items()}, self.global_step)
        if all(member.history.diverged for member in self.members):
            self.trainer.should_stop = True

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: self.stacked[safe] for name, safe in self._names.items() if safe in self.stacked}

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(self._names[name]) for name in self._buffer_names}

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [member.trainer.optimizers[0] for member in self.members]


@dataclass
class Schedules:
    """The learning-rate schedules of the members, as the Trainer sees them."""

    optimizer: Optimizer
    schedules: Sequence[Any]

    def step(self) -> None:
        """Moves each."""
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each member keeps that of its own."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class _Measured(nn.Module):
    """A task whose `forward` is its `compute_metrics`, as `functional_call` wants it."""

    prefix = "task."

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> dict[str, Tensor]:
        measured = self.task.compute_metrics(batch)
        return {name: measured[name] for name in self.task.metric_names}
