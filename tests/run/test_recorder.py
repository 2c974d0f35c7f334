"""What is kept of a run: its history, and the clock of its training."""

import time
from itertools import pairwise

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback

from kvt.run.callbacks import RunCallback
from kvt.tasks import DigitLists, ListTask

SECONDS = 0.05  # of each pause


def train(epochs, *callbacks, **settings):
    """Train a small task for some epochs of four steps."""
    data = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=epochs, callbacks=[*callbacks], **quiet, **settings)
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    return trainer


def test_every_callback_that_listens_is_told_what_the_history_keeps():
    history, listener, told = RunCallback(), L.Callback(), []
    listener.on_record = lambda _, *named: told.append(named)
    train(1, history, listener, log_every_n_steps=2, num_sanity_val_steps=0)
    kept = [(name, value) for row in history.rows for name, value in row.items() if "/" in name]
    assert told == kept
    measured = {"train/loss", "train/acc", "val/loss", "val/acc"}
    assert {name for name, _ in kept} == measured | {"train/lr", "train/grad_norm"}


def test_a_stop_between_two_logs_loses_no_seconds():
    """Its state after each step is what a run stopped there would save."""
    recorder, seconds = RunCallback(), [0.0]

    def stop(trainer, task, *_):
        time.sleep(SECONDS)
        recorder.on_save_checkpoint(trainer, task, saved := {})
        seconds.append(saved["run"]["seconds"])

    train(1, recorder, LambdaCallback(on_train_batch_end=stop), log_every_n_steps=1000)
    assert len(seconds) == 5
    assert all(later - before >= SECONDS for before, later in pairwise(seconds))


def test_the_clock_counts_every_prediction_of_training_and_its_seconds_alone():
    recorder, resumed = RunCallback(), RunCallback()
    start = time.perf_counter()
    places = ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")  # wherever it does not train
    pauses = LambdaCallback(**dict.fromkeys(places, lambda *_: time.sleep(SECONDS)))
    trainer = train(3, recorder, pauses, num_sanity_val_steps=2)
    # three pauses in each of three epochs; those of the sanity check come before the clock
    assert 0 < recorder.seconds <= time.perf_counter() - start - 9 * SECONDS
    assert recorder.count == 3 * 40 * 6
    assert recorder.rate * recorder.seconds == pytest.approx(recorder.count)
    recorder.on_save_checkpoint(trainer, trainer.lightning_module, saved := {})
    resumed.on_load_checkpoint(trainer, trainer.lightning_module, saved)
    assert resumed.rate == recorder.rate
