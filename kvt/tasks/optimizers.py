"""Makes the optimiser of a task."""

from inspect import signature
from pkgutil import resolve_name
from typing import Any

from torch.optim import Optimizer

from kvt.system import UserError


def make_optimizer(task: Any, **of_adam: Any) -> Optimizer:
    """Return the optimiser that `--optimizer` names, with the task's learning rate; default: `Adam(**of_adam)`.

    On CPUs and CUDA GPUs, a fused implementation is used if there is one, unless the run sets `fused`, `foreach` or
    `differentiable`. Raises UserError if the class does not accept the settings or the weights.
    """
    asked = task.optimizer_config or {"class_path": "torch.optim.Adam", "init_args": of_adam}
    cls: type[Optimizer] = resolve_name(asked["class_path"])
    given, weights = asked.get("init_args", {}), [*task.parameters()]
    can_fuse = "fused" in signature(cls).parameters and not given.keys() & {"foreach", "differentiable"}
    fuses = can_fuse and all(weight.device.type in ("cpu", "cuda") for weight in weights)
    try:
        optimizer = cls(weights, **{"lr": task.lr, **({"fused": True} if fuses else {}), **given})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optimizer {asked['class_path']}: {error}") from error
    # so that Lightning unscales float16 gradients: it cannot clip gradients that a fused optimiser unscales
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return optimizer
