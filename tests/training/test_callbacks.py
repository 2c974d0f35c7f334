"""What is watched while a model trains."""

import time

import lightning as L
import pytest

from kvt.tasks import DigitLists, ListTask
from kvt.training.callbacks import Throughput


def test_throughput_counts_every_prediction_and_counts_on_after_a_restart():
    throughput = Throughput()
    data = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[throughput],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert throughput.count == 3 * 40 * 6
    assert throughput.rate * throughput.seconds == pytest.approx(throughput.count)
    resumed = Throughput()
    resumed.load_state_dict(throughput.state_dict())
    assert resumed.rate == throughput.rate


class Slow(L.Callback):
    """Takes its time wherever the model is not being trained."""

    SECONDS = 0.4

    def on_validation_epoch_end(self, trainer, pl_module):
        time.sleep(self.SECONDS)

    on_validation_end = on_train_epoch_end = on_validation_epoch_end


@pytest.mark.slow
def test_what_is_not_training_is_off_the_clock():
    throughput = Throughput()
    data = DigitLists(length=4, train_size=20, val_size=8, test_size=8, batch_size=10)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=3, callbacks=[throughput, Slow()], num_sanity_val_steps=2, **quiet)
    start = time.perf_counter()
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    wall = time.perf_counter() - start
    pauses = Slow.SECONDS * 3 * 3  # three hooks, three epochs; the sanity check comes before the clock
    assert 0 < throughput.seconds <= wall - pauses
