"""The progress bar."""

import lightning as L

from kvt.run.callbacks import ProgressBar
from kvt.run.recorder import Recorder
from kvt.tasks import DigitLists, ListTask


def test_the_bar_shows_loss_and_score_first_and_the_rate_last(tmp_path):
    data, bar = DigitLists(length=6, train_size=40, val_size=8, test_size=8, batch_size=10), ProgressBar()
    logger = L.pytorch.loggers.CSVLogger(tmp_path)  # whose version Lightning would show
    trainer = L.Trainer(max_epochs=1, callbacks=[Recorder(), bar], logger=logger, log_every_n_steps=1)
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert [*bar.get_metrics(trainer, trainer.lightning_module)] == ["loss", "val/acc", "acc", "val/loss", "tokens/s"]
