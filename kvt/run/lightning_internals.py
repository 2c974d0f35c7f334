"""Everything that uses private attributes of Lightning; checked with version 2.6.6.

Lightning has no public way to stop between two steps with its loops in a resumable state, to validate after the last
step, or to reach the average of a `WeightAveraging` callback.
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging


def stop_after_this_batch(trainer: L.Trainer, stop: bool = True) -> None:
    """Make the Trainer raise SIGTERMException after this batch, when its loops know that the batch is done."""
    trainer._signal_connector.received_sigterm = stop


def validate_after_training(trainer: L.Trainer) -> None:
    """Run the validation loop once more, after the last training step, and log it at that step."""
    loop = trainer.fit_loop.epoch_loop
    loop._batches_that_stepped -= 1  # Lightning logs at this number, which has moved past the last step
    trainer.validating, loop.val_loop.restarting = True, False  # from its first batch, even if resumed amid one
    try:
        loop.val_loop.run()
    finally:
        trainer.training = True


def end_of_validation_after_training(trainer: L.Trainer) -> None:
    """Undo the change of `validate_after_training` to the step, before checkpoints are written."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


@torch.no_grad()
def copy_constants_into_averages(trainer: L.Trainer) -> None:
    """Copy a model's constants, buffers of integers or outside checkpoints, into the averages of its weights.

    Lightning averages all buffers. Averaging rounds equal numbers, and truncates integers.
    """
    model = trainer.lightning_module
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not (isinstance(callback, WeightAveraging) and callback._average_model):
            continue
        average, saved = callback._average_model.module, model.state_dict().keys()
        for (name, buffer), averaged in zip(model.named_buffers(), average.buffers(), strict=True):
            if name not in saved or not buffer.is_floating_point():
                averaged.copy_(buffer)
