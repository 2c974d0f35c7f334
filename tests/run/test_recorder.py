"""What is kept of a run: its history, and the clock of its training."""

import time
from itertools import pairwise

import lightning as L
import pytest

from kvt.run.callbacks import RunCallback
from kvt.tasks import DigitLists, ListTask

SECONDS = 0.05  # of each pause


class Pauses(L.Callback):
    """Takes time wherever the model is not being trained."""

    def on_validation_epoch_end(self, trainer, pl_module):
        time.sleep(SECONDS)

    on_validation_end = on_train_epoch_end = on_validation_epoch_end


class Stops(L.Callback):
    """Keeps the state that a run stopped after a step would save."""

    def __init__(self, recorder):
        self.recorder, self.seconds = recorder, [0.0]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        time.sleep(SECONDS)
        self.recorder.on_save_checkpoint(trainer, pl_module, saved := {})
        self.seconds.append(saved["run"]["seconds"])


class Listens(L.Callback):
    """Is told every metric that the task records."""

    def __init__(self):
        self.told = []

    def on_record(self, name, value):
        self.told.append((name, value))


def train(epochs, *callbacks, **settings):
    """Train a small task for some epochs of four steps."""
    data = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[*callbacks], **quiet, **settings)
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    return trainer


def test_every_callback_that_listens_is_told_what_the_history_keeps():
    history, listener = RunCallback(), Listens()
    train(1, history, listener, log_every_n_steps=2, num_sanity_val_steps=0)
    kept = [(name, value) for row in history.rows for name, value in row.items() if "/" in name]
    assert listener.told == kept
    measured = {"train/loss", "train/acc", "val/loss", "val/acc"}
    assert {name for name, _ in kept} == measured | {"train/lr", "train/grad_norm"}


def test_a_stop_between_two_logs_loses_no_seconds():
    stops = Stops(RunCallback())
    train(1, stops.recorder, stops, log_every_n_steps=1000)
    assert len(stops.seconds) == 5
    assert all(later - before >= SECONDS for before, later in pairwise(stops.seconds))


def test_the_clock_counts_every_prediction_of_training_and_its_seconds_alone():
    recorder, resumed = RunCallback(), RunCallback()
    start = time.perf_counter()
    trainer = train(3, recorder, Pauses(), num_sanity_val_steps=2)
    # three pauses in each of three epochs; those of the sanity check come before the clock
    assert 0 < recorder.seconds <= time.perf_counter() - start - 9 * SECONDS
    assert recorder.count == 3 * 40 * 6
    assert recorder.rate * recorder.seconds == pytest.approx(recorder.count)
    recorder.on_save_checkpoint(trainer, trainer.lightning_module, saved := {})
    resumed.on_load_checkpoint(trainer, trainer.lightning_module, saved)
    assert resumed.rate == recorder.rate
