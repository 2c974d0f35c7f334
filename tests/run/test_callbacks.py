"""The progress bar, when pictures are drawn, and callbacks of the user's: what is refused, and what is recorded."""

from dataclasses import replace

import lightning as L
import pytest
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import TensorBoardLogger

import kvt
from kvt.cli.lightning_cli import run_words
from kvt.run import pictures
from kvt.run.callbacks import ProgressBar
from kvt.run.pictures import Shown
from kvt.run.recorder import Recorder
from kvt.run.run import make_trainer
from kvt.run.settings import trainer_objects
from kvt.system.console import run
from kvt.system.errors import UserError
from kvt.tasks import DigitLists, ListTask
from tests.conftest import QUIET, SMALL_LISTS

SIZES = {"train_size": 32, "val_size": 16, "test_size": 16, "batch_size": 16, "dim": 16, "depth": 1, "max_epochs": 1}
REVERSE = kvt.RunConfig.from_name("reverse").changed(**SIZES, accelerator="cpu", enable_progress_bar=False)
REFUSALS = {
    "BatchSizeFinder": "pass --batch_size, or compare batch sizes with kvt study",
    "GradientAccumulationScheduler": "pass --accumulate_grad_batches",
    "LearningRateFinder": "pass --lr, or compare learning rates with kvt study",
    "ModelPruning": "prune the trained model, kvt.load",
    "StochasticWeightAveraging": "choose EMAWeightAveraging",
    "SpikeDetection": "choose EarlyStopping with divergence_threshold",
    "BackboneFinetuning": "freeze weights with requires_grad_",
}
"""What is refused, and the remedy that is named."""
ARGUMENTS = {
    "GradientAccumulationScheduler": {"scheduling": {"4": 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured"},
    "StochasticWeightAveraging": {"swa_lrs": 0.01},
}


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
            super().__init__(Recorder())
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


class Own(theirs.BatchSizeFinder):
    pass


class Asks(ListTask):
    def configure_callbacks(self):
        return Own()


@pytest.mark.parametrize("name", REFUSALS)
def test_what_makes_a_record_untrue_is_refused(mistake, name):
    """From the command line, and from Python."""
    config = REVERSE.changed(callbacks=[{"class_path": name, "init_args": ARGUMENTS.get(name, {})}])
    words = [f"--trainer.callbacks={config.trainer['callbacks']}".replace("None", "null"), *QUIET, *SMALL_LISTS]
    assert name in mistake(lambda: run(lambda: run_words(["fit", "--config", "reverse", *words])))
    callback = trainer_objects({"callbacks": config.trainer["callbacks"]})["callbacks"][0]
    with pytest.raises(UserError, match=name):
        kvt.train(REVERSE, callbacks=[callback])


def test_a_class_derived_from_a_refused_one_is_refused_whoever_adds_it(in_tmp_dir):
    """A task, too, may have callbacks."""
    by_task = replace(REVERSE, model={**REVERSE.model, "class_path": f"{__name__}.Asks"})
    for config in (REVERSE.changed(callbacks={"class_path": f"{__name__}.Own"}), by_task):
        with pytest.raises(UserError, match="Own"):
            kvt.train(config)


class Changes(L.Callback):
    """Changes its argument, as some of Lightning's do."""

    def __init__(self, numbers: dict[str, list[int]]) -> None:
        self.numbers = numbers

    def setup(self, trainer, pl_module, stage):
        self.numbers["a"].append(7)
        self.numbers[0] = []


def test_an_object_that_changes_its_arguments_leaves_the_record_as_it_is(in_tmp_dir):
    given = {"callbacks": {"class_path": f"{__name__}.Changes", "init_args": {"numbers": {"a": [1]}}}}
    folder = kvt.train(REVERSE.changed(**given)).folder
    again = kvt.RunConfig.from_run(folder)
    assert again.trainer["callbacks"]["init_args"] == {"numbers": {"a": [1]}}
    kvt.train(again)


@pytest.mark.parametrize("bar", [theirs.RichProgressBar, theirs.TQDMProgressBar, ProgressBar])
def test_a_bar_of_the_users_replaces_kvts(in_tmp_dir, bar):
    """And it shows the last validation, as it comes after the callback that asks for it."""
    mine, other = bar(), L.Callback()
    trainer = make_trainer(REVERSE.changed(enable_progress_bar=None), [mine, other], logger=False)
    bars = [callback for callback in trainer.callbacks if isinstance(callback, theirs.ProgressBar)]
    assert bars == [mine]
    assert trainer.callbacks.index(other) < trainer.callbacks.index(mine)
    kvt.train(REVERSE.changed(enable_progress_bar=None), callbacks=[bar()])


def test_without_a_bar_of_the_users_there_is_kvts():
    for setting, bars in ((None, 1), (True, 1), (False, 0)):
        trainer = make_trainer(REVERSE.changed(enable_progress_bar=setting), logger=False)
        assert sum(isinstance(callback, ProgressBar) for callback in trainer.callbacks) == bars
