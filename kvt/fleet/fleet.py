"""Many models of one shape, trained as one.

Each `FleetRun` is an ordinary run in its own thread, which pauses where its training would begin. `FleetTrainer` then
trains their stacked models with one Trainer: one `vmap` computes the steps of all. At every validation and epoch end,
weights and optimiser states are copied back to the runs, whose callbacks write their checkpoints.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from kvt.fleet.loader import OwnStreams, Stack
from kvt.fleet.member import FleetRun
from kvt.fleet.optimizer import clip_norms, join_optimizers, own_rates, split_optimizer
from kvt.system.errors import UserError
from kvt.tasks import Task
from kvt.tasks.base import EXACT
from kvt.training.callbacks import load_metric_state, metric_state


class Fleet(Task):
    """N tasks of one shape as one task: parameters stacked to (N, …), losses added, one optimiser. Metrics are (N,).

    The gradient of Σᵢ lossᵢ with respect to the parameters of member i is that of lossᵢ, so each member takes the steps
    that it would take alone. A member whose loss is not finite does not affect the others.

    On the CPU each member draws the random numbers that it would draw alone. In float64 its weights equal those of a
    single run up to rounding; in float32 they drift apart, since Adam divides a gradient by its size, however small.
    On a GPU, dropout and augmentation differ from a single run's.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, members: Sequence[FleetRun]) -> None:
        first = members[0].model
        self.unit, self.metric_names = first.unit, first.metric_names  # type: ignore[misc]
        super().__init__({})
        self.members = members
        for metric in self.metrics.values():
            metric.add_state("total", torch.zeros(len(members), dtype=EXACT), dist_reduce_fx="sum")
        self._models = tuple(_MetricsModule(member.model) for member in members)  # a tuple: not submodules
        weights, buffers = stack_module_state([*self._models])
        self._keys = {name: name.replace(".", "/") for name in [*weights, *buffers]}  # torch forbids dots in keys
        stacked = {self._keys[name]: nn.Parameter(p.detach(), p.requires_grad) for name, p in weights.items()}
        self.stacked, self._buffer_names = nn.ParameterDict(stacked), [*buffers]
        for name, buffer in buffers.items():
            self.register_buffer(self._keys[name], buffer, persistent=False)

    def save_hyperparameters(self, *args: Any, **settings: Any) -> None:
        """Save none: each member has its own."""

    def compute_metrics(self, batch: Stack) -> dict[str, Tensor]:
        model = self._models[0].train(self.training)

        def compute(weights: dict[str, nn.Parameter], buffers: dict[str, Tensor], tensors: Any) -> Any:
            state: dict[str, Tensor] = {**weights, **buffers}
            metrics = functional_call(model, state, (tensors,))
            return metrics, {name: state[name] for name in buffers}  # buffers that the call assigned are in `state`

        metrics: dict[str, Tensor]
        arguments = self._weights(), self._own_buffers(), batch.tensors
        own = self.training and self.device.type == "cpu"  # N small draws on a GPU would cost what a fleet saves
        with OwnStreams(batch.streams) if own else nullcontext():
            metrics, buffers = vmap(compute, randomness="different")(*arguments)
        for name, buffer in buffers.items():
            setattr(self, self._keys[name], buffer)
        return metrics

    def num_predictions(self, batch: Stack) -> int | Tensor:
        return self.members[0].model.num_predictions(tuple(tensor[0] for tensor in batch.tensors))

    def training_step(self, batch: Stack, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).sum()

    def on_after_batch_transfer(self, batch: Stack, dataloader_idx: int) -> Stack:
        """Call the hook of each member's data, such as augmentation, with the member's batch and random numbers."""
        hook = type(self.members[0].datamodule).on_after_batch_transfer
        if hook is L.LightningDataModule.on_after_batch_transfer:
            return batch
        done = []
        for member, stream, *tensors in zip(self.members, batch.streams, *batch.tensors, strict=True):
            member.trainer.state.stage = self.trainer.state.stage
            with torch.random.fork_rng(devices=()):  # the hook draws from torch's default generator
                torch.set_rng_state(stream.get_state())
                done.append(hook(member.datamodule, tuple(tensors), dataloader_idx))
                stream.set_state(torch.get_rng_state())
        return Stack(tuple(torch.stack(tensors) for tensors in zip(*done, strict=True)), batch.streams)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        first = dict(self._models[0].named_parameters())
        optimizer = join_optimizers(self._optimizers, {first[name]: p for name, p in self._weights().items()})
        configs = [member.trainer.lr_scheduler_configs for member in self.members]
        if not (first_configs := configs[0]):
            return optimizer
        if len(first_configs) != 1 or first_configs[0].reduce_on_plateau:
            raise UserError("--fleet: takes one learning-rate schedule, which follows the steps alone")
        for own in self._optimizers:
            own.step()  # without gradients it changes nothing; else torch warns that a schedule steps first
        schedules = _Schedules(optimizer, [config[0].scheduler for config in configs])
        timing = {"interval": first_configs[0].interval, "frequency": first_configs[0].frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules, **timing}}  # type: ignore[return-value]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        with own_rates(self.optimizers().optimizer, self._optimizers):  # type: ignore[union-attr]
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_algorithm == "value" or not gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            clip_norms([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)

    def on_train_start(self) -> None:
        """Take over the members' running means, which a resumed run has."""
        states = [metric_state(member.model) for member in self.members]
        for name, parts in states[0].items():
            states[0][name] = {**parts, "total": torch.stack([state[name]["total"] for state in states])}
        load_metric_state(self, states[0])

    def on_validation_end(self) -> None:
        self._call_members("on_validation_end")

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self._call_members("on_train_epoch_end")

    def on_train_end(self) -> None:
        self.update_members()

    def on_test_epoch_end(self) -> None:
        for member, means in zip(self.members, self._pop_member_means("test"), strict=True):
            if member.to_test:
                member.take_test(means)

    @torch.no_grad()
    def update_members(self) -> None:
        """Copy weights, buffers, optimiser states, running means and progress to the members."""
        state, progress = {**self._weights(), **self._own_buffers()}, self.trainer.fit_loop.state_dict()
        split_optimizer(self.optimizers().optimizer, self._optimizers)  # type: ignore[union-attr]
        for n, (model, member) in enumerate(zip(self._models, self.members, strict=True)):
            for name, tensor in chain(model.named_parameters(), model.named_buffers()):
                tensor.copy_(state[name][n])
            member.trainer.fit_loop.load_state_dict(progress)
            sums = metric_state(self).items()
            load_metric_state(member.model, {name: {**parts, "total": parts["total"][n]} for name, parts in sums})

    @torch.no_grad()
    def load_weights(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Load the members' state dicts; buffers that these do not hold stay as they are."""
        for name, tensor in chain(self._weights().items(), self._own_buffers().items()):
            if (key := name.removeprefix("task.")) in states[0]:
                tensor.copy_(torch.stack([state[key].to(tensor) for state in states]))

    def _call_members(self, hook: str) -> None:
        self.update_members()
        for member in self.members:
            member.call_callbacks(hook)

    def _log_metrics(self, stage: str) -> None:
        means = self._pop_member_means(stage)
        if not self.trainer.sanity_checking:
            for member, own in zip(self.members, means, strict=True):
                member.record(own, self.global_step)
            self.trainer.should_stop |= all(member.history.diverged for member in self.members)

    def _pop_member_means(self, stage: str) -> list[dict[str, float]]:
        means = self._pop_means(stage)
        return [{name: float(mean[n]) for name, mean in means.items()} for n in range(len(self.members))]

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: self.stacked[key] for name, key in self._keys.items() if key in self.stacked}

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(self._keys[name]) for name in self._buffer_names}

    @property
    def _optimizers(self) -> list[Optimizer]:
        return [member.trainer.optimizers[0] for member in self.members]


class _Schedules(LRScheduler):
    """The members' learning-rate schedules, as one for the Trainer."""

    def __init__(self, optimizer: Optimizer, schedules: Sequence[Any]) -> None:
        self.optimizer, self.schedules = optimizer, schedules

    def step(self, epoch: int | None = None) -> None:
        for schedule in self.schedules:
            schedule.step()


class _MetricsModule(nn.Module):
    """A task whose `forward` returns its metrics, for `functional_call`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> dict[str, Tensor]:
        metrics = self.task.compute_metrics(batch)
        return {name: metrics[name] for name in self.task.metric_names}
