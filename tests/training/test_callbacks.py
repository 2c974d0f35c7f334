"""What is measured while a model trains."""

import time

import lightning as L
import pytest

from kvt.tasks import DigitLists, ListTask
from kvt.training.callbacks import ProgressBar
from kvt.training.recorder import Recorder

SECONDS = 0.05


class Pauses(L.Callback):
    """Takes time wherever the model is not being trained."""

    def on_validation_epoch_end(self, trainer, pl_module):
        time.sleep(SECONDS)

    on_validation_end = on_train_epoch_end = on_validation_epoch_end


def test_the_clock_counts_every_prediction_of_training_and_its_seconds_alone():
    recorder, resumed = Recorder(), Recorder()
    data = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=3, callbacks=[recorder, Pauses()], num_sanity_val_steps=2, **quiet)
    start = time.perf_counter()
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    # three pauses in each of three epochs; those of the sanity check come before the clock
    assert 0 < recorder.seconds <= time.perf_counter() - start - 9 * SECONDS
    assert recorder.count == 3 * 40 * 6
    assert recorder.rate * recorder.seconds == pytest.approx(recorder.count)
    resumed.setup(trainer, trainer.lightning_module, "test")
    resumed.load_state_dict(recorder.state_dict())
    assert resumed.rate == recorder.rate


def test_the_bar_shows_loss_and_score_first_and_the_rate_last(tmp_path):
    data, bar = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10), ProgressBar()
    logger = L.pytorch.loggers.CSVLogger(tmp_path)  # whose version Lightning would show
    trainer = L.Trainer(max_epochs=1, callbacks=[Recorder(), bar], logger=logger, log_every_n_steps=1)
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert [*bar.get_metrics(trainer, trainer.lightning_module)] == ["loss", "acc", "val/loss", "val/acc", "tokens/s"]
