"""Makes the optimiser of a task, and a second optimiser for weights that the first optimiser does not support."""

import re
from collections.abc import Callable, Sequence
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kvt.attention import Attention
from kvt.system.errors import UserError

DEFAULT = "torch.optim.Adam"


class Together(Optimizer):
    """One optimiser made of several optimisers of different weights, with all their parameter groups and states.

    Attributes:
        parts: the optimisers, in the order of `param_groups`.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let all `parts` use the parameter groups and the state of this optimiser."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups, part.state = [next(groups) for _ in part.param_groups], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with every optimiser in `parts`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def make_optimizer(task: Any, **of_adam: Any) -> Optimizer:
    """Return the optimiser that `--optimizer` names, with the task's learning rate; default: Adam.

    The optimiser uses its fused implementation if its class and the device have one, unless the run sets `foreach` or
    `differentiable`. If an optimiser does not accept all weights, such as Muon, it trains the matrices in blocks, and
    Adam trains the remaining weights. Raises UserError if the class does not accept the settings.

    Args:
        task: the task whose weights are trained.
        of_adam: keyword arguments of Adam.
    """
    default = {"class_path": DEFAULT, "init_args": of_adam}
    weights = [*task.parameters()]
    if (asked := task.optimizer_config) is None:
        return _made(task, default, weights)
    try:
        return _made(task, asked, weights)
    except (TypeError, ValueError, RuntimeError) as error:
        own = matrices_in_blocks(task)
        try:
            first = _made(task, asked, [*own.values()])
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"--optimizer {asked['class_path']}: {error}") from error
    ids = {*map(id, own.values())}
    rest = [weight for weight in weights if id(weight) not in ids]
    names = ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in own))
    task.metric_notes["optimizer"] = f"{asked['class_path']} trains {names}; {DEFAULT} trains all other weights"
    return _scaled_by_lightning(Together(first, _made(task, default, rest)))


def matrices_in_blocks(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return matrices in attentions and in `nn.ModuleList` blocks, with at least two rows and two columns, by name."""
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList | Attention)]
    layers = [layer for block in blocks for layer in block.modules() if not isinstance(layer, nn.Embedding)]
    inside = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if id(weight) in inside and weight.ndim == 2 and min(weight.shape) > 1
    }


def _made(task: Any, asked: dict[str, Any], weights: Sequence[Tensor]) -> Optimizer:
    cls: type[Optimizer] = resolve_name(asked["class_path"])
    given = asked.get("init_args", {})
    can_fuse = "fused" in signature(cls).parameters and not given.keys() & {"foreach", "differentiable"}
    fuses = can_fuse and all(weight.device.type in ("cpu", "cuda") for weight in weights)
    settings = {"lr": task.lr, **({"fused": True} if fuses else {}), **given}
    return _scaled_by_lightning(cls(weights, **settings))


def _scaled_by_lightning(optimizer: Optimizer) -> Optimizer:
    """Let Lightning unscale float16 gradients. If a fused optimiser unscaled them, Lightning could not clip them."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer
