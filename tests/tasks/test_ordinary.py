"""Tasks work in a plain Trainer with the callbacks of Lightning, and kvt reads what such a Trainer saves."""

from itertools import product

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger

import kvt as package
from kvt.tasks.base import known_classes
from tests.conftest import slow
from tests.helpers.small_tasks import TASKS
from tests.tasks.test_lightning_cli import SMALL

CALLBACKS = {
    "EarlyStopping": lambda: theirs.EarlyStopping("val/loss", patience=5),
    "EMAWeightAveraging": lambda: theirs.EMAWeightAveraging(decay=0.5, use_buffers=False),
    "LearningRateMonitor": lambda: theirs.LearningRateMonitor("step"),
    "GradientAccumulationScheduler": lambda: theirs.GradientAccumulationScheduler({1: 2}),
    "LearningRateFinder": lambda: theirs.LearningRateFinder(num_training_steps=4, early_stop_threshold=None),
    "BatchSizeFinder": lambda: theirs.BatchSizeFinder(steps_per_trial=1, max_trials=1),
    "StochasticWeightAveraging": lambda: theirs.StochasticWeightAveraging(1e-3, swa_epoch_start=1),
    "RichProgressBar": theirs.RichProgressBar,
}
QUIET = {"accelerator": "cpu", "enable_model_summary": False}
LIMITS = {"limit_train_batches": 2, "limit_val_batches": 2, "limit_test_batches": 1, "limit_predict_batches": 1}
FAST = [pair for pair in zip(CALLBACKS, TASKS, strict=False) if pair[0] != "BatchSizeFinder"]
LACKS = ("BatchSizeFinder", "RecallTask")  # Lightning refuses several test data loaders
REST = [pair for pair in product(CALLBACKS, TASKS) if pair not in (*FAST, LACKS)]


def trainer(epochs: int, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(max_epochs=epochs, logger=CSVLogger("logs"), callbacks=[*callbacks], **QUIET, **LIMITS)


@pytest.mark.parametrize(("callback", "name"), [*FAST, *slow(*REST)])
def test_a_plain_trainer_takes_each_callback_and_kvt_its_checkpoint(callback, name, kvt):
    if callback == "RichProgressBar":
        pytest.importorskip("rich")
    cls, settings = SMALL[name]
    data = known_classes()[cls](**settings)
    task = TASKS[name](data.spec, dim=8, depth=1, heads=2)
    best = theirs.ModelCheckpoint(monitor=task.monitor, save_last=True)
    first = trainer(2, CALLBACKS[callback](), best)
    first.fit(task, data)
    path, last = best.best_model_path, best.last_model_path  # `test` restores the callback's state of the best
    (validated,) = first.validate(task, data, verbose=False)
    assert task.monitor in validated
    assert first.predict(task, data)
    if "test" in data.splits:
        first.test(task, data, ckpt_path="best", verbose=False)
    more = trainer(3, CALLBACKS[callback]())
    more.fit(TASKS[name](data.spec, dim=8, depth=1, heads=2), data, ckpt_path=last, weights_only=True)
    assert more.global_step > first.global_step
    loaded = TASKS[name].load_from_checkpoint(path).eval()
    inputs = task.inputs(data.example(0))
    assert torch.equal(loaded(*inputs), package.load(path)(*inputs))
    flags = ["--accelerator", "cpu", "--enable_progress_bar", "false", "--ckpt_path", last]
    kvt("validate", *flags)
    if callback != "StochasticWeightAveraging":  # its schedule is in the checkpoint
        kvt("fit", *flags, "--max_epochs", "3", "--limit_train_batches", "2", "--limit_val_batches", "2")
