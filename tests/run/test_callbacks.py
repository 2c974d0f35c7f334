"""The progress bar, when pictures are drawn and callbacks of the user's."""

import lightning as L
import pytest
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import TensorBoardLogger

import kvt
from kvt.run.callbacks import Lines
from kvt.run.cli import KvtCLI
from kvt.run.fit import make_trainer
from kvt.tasks import DigitLists, ListTask
from kvt.view.pictures import Shown
from tests.helpers.runs import REVERSE


def test_pictures_are_drawn_after_validation_1_2_4_and_so_on_and_after_the_last(tmp_path):
    class Steps(Shown):
        def __init__(self):
            self.steps = []

        def show_maps(self, loggers, pl_module, trainer):
            assert not pl_module.training
            self.steps.append(trainer.global_step)

    data, shown = DigitLists(length=6, train_size=50, val_size=1, test_size=1, batch_size=1), Steps()
    trainer = L.Trainer(
        **{"max_epochs": 1, "val_check_interval": 1, "num_sanity_val_steps": 1, "enable_progress_bar": False},
        **{"callbacks": [shown], "logger": TensorBoardLogger(tmp_path), "accelerator": "cpu"},
    )
    trainer.fit(ListTask(data.spec, dim=8, depth=1, heads=2), data)
    assert shown.steps == [1, 2, 4, 8, 16, 32, 50]


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


def bars(trainer):
    return [callback for callback in trainer.callbacks if isinstance(callback, theirs.ProgressBar | Lines)]


@pytest.mark.parametrize("bar", [theirs.RichProgressBar, theirs.TQDMProgressBar])
def test_a_bar_of_the_users_replaces_kvts(in_tmp_dir, bar):
    mine = bar()
    assert bars(make_trainer(KvtCLI(REVERSE.changed(enable_progress_bar=None).as_dict()), [mine])) == [mine]


def test_only_a_terminal_shows_a_bar_beside_the_lines(monkeypatch):
    for in_terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=in_terminal: answer)
        for setting, number in ((None, 1 + in_terminal), (True, 1 + in_terminal), (False, 0)):
            trainer = make_trainer(KvtCLI(REVERSE.changed(enable_progress_bar=setting).as_dict()))
            assert len(bars(trainer)) == number
