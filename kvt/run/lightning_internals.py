"""Everything that uses private attributes of Lightning; checked with version 2.6.6.

Lightning has no public way to stop between two steps with its loops in a resumable state, or to validate after the last
step.
"""

import lightning as L


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
