"""Code that relies on private or undocumented behaviour of Lightning, tested with Lightning 2.6.6.

`Task.__setattr__` is the only such code elsewhere.

Lightning has no public way to stop between two steps with loops in a resumable state, to validate after the last step,
to step each schedule in a resumed epoch, or to forbid Lightning's own choice of a checkpoint.
"""

from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import SLURMEnvironment


class OutsideSteps:
    """A base class of callbacks that makes the Trainer skip the hooks of the backward pass and of the optimiser step.

    A subclass may define one of these hooks. The Trainer looks up a key, opens a context of the profiler and calls the
    hook, even if the hook does nothing. It skips a hook that is not callable.
    """

    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None


def load_only_named_checkpoints(trainer: L.Trainer) -> None:
    """Make the Trainer load only the file `ckpt_path`, and prevent it from resubmitting SLURM jobs.

    Without `ckpt_path`, the Trainer would load any hpc_ckpt_N.ckpt of the working directory in a SLURM job, and the
    file of an `OnExceptionCheckpoint` in `fit`. The Trainer writes hpc_ckpt_N.ckpt when it resubmits a job.
    """
    trainer._checkpoint_connector._select_ckpt_path = _named_checkpoint  # type: ignore[assignment, method-assign]
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False


def _named_checkpoint(state_fn: Any, ckpt_path: Any, **_: bool) -> Any:
    return ckpt_path


def stop_after_this_batch(trainer: L.Trainer, stop: bool = True) -> None:
    """Make the Trainer raise SIGTERMException after this batch, when its loops have counted the batch."""
    trainer._signal_connector.received_sigterm = stop


def step_plateau_schedules(trainer: L.Trainer) -> None:
    """Make the Trainer step `ReduceLROnPlateau` at the end of this epoch, even if the run was resumed in this epoch.

    Lightning skips that step of the schedule, because Lightning's own checkpoints lack the metrics.
    """
    # With the public property `restarting`, later epochs of a run with max_steps would have no batches.
    trainer.fit_loop._restarting = False


def validate_after_training(trainer: L.Trainer) -> None:
    """Run the validation loop once more after the last training step, and log its metrics at that step."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped -= 1  # Lightning logs at this number, which would exceed the last step by 1
    trainer.validating, loop.val_loop.restarting = True, False  # even a resumed run starts at the first batch
    try:
        loop.val_loop.run()
    finally:
        trainer.training = True


def end_of_validation_after_training(trainer: L.Trainer) -> None:
    """Restore the step that `validate_after_training` has changed, before checkpoints are written."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1
