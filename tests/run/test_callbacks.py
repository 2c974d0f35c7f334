"""The progress bar, and when pictures are drawn."""

import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from kvt.run import pictures
from kvt.run.callbacks import ProgressBar
from kvt.run.pictures import Shown
from kvt.run.recorder import Recorder
from kvt.tasks import DigitLists, ListTask


def test_the_bar_shows_loss_and_score_first_and_the_rate_last(tmp_path):
    data, bar = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10), ProgressBar()
    logger = L.pytorch.loggers.CSVLogger(tmp_path)  # whose version Lightning would show
    trainer = L.Trainer(max_epochs=1, callbacks=[Recorder(), bar], logger=logger, log_every_n_steps=1)
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert [*bar.get_metrics(trainer, trainer.lightning_module)] == ["loss", "val/acc", "acc", "val/loss", "tokens/s"]


@pytest.mark.parametrize(
    ("takes", "after_steps"),
    [(0.0, [*range(1, 51)]), (1.0, [1, 21, 41, 50]), (2.4, [1, 49, 50]), (1000.0, [1, 50])],
)
def test_between_first_and_last_only_what_takes_a_twentieth_of_the_time_is_shown(
    tmp_path, monkeypatch, takes, after_steps
):
    """A step takes a second of a clock that only training and showing move."""
    now = 7.0
    monkeypatch.setattr(pictures, "perf_counter", lambda: now)

    class Clock(Shown):
        def __init__(self):
            super().__init__()
            self.steps = []

        def on_train_batch_end(self, *args, **kwargs):
            nonlocal now
            now += 1

        def show(self, loggers, pl_module, trainer):
            nonlocal now
            now += takes
            assert not pl_module.training
            self.steps.append(trainer.global_step)

    data, shown = DigitLists(length=6, train_size=50, val_size=1, test_size=1, batch_size=1), Clock()
    trainer = L.Trainer(
        **{"max_epochs": 1, "val_check_interval": 1, "num_sanity_val_steps": 1, "enable_progress_bar": False},
        **{"callbacks": [Recorder(), shown], "logger": TensorBoardLogger(tmp_path), "accelerator": "cpu"},
    )
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert shown.steps == after_steps
