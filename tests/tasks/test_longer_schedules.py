"""Training that continues from a checkpoint for longer has the schedule of the longer run."""

import lightning as L
import pytest

import kvt
from tests.conftest import slow
from tests.run.test_overfit import small


class Rates(L.Callback):
    """The learning rate with which each step is made."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.of[trainer.global_step] = optimizer.param_groups[0]["lr"]


def rates(config: kvt.RunConfig, folder: str) -> dict[int, float]:
    seen = Rates()
    kvt.train(config, folder, callbacks=[seen], test=False)
    return seen.of


@pytest.mark.parametrize("task", ["reverse", "human_numbers", *slow("language_model")])
def test_a_schedule_spans_the_longer_run(in_tmp_dir, task):
    config = small(task, max_epochs=2, batch_size=4, limit_train_batches=6, limit_val_batches=1)
    rates(config, "parent")
    longer = {"max_epochs": 4, "ckpt_path": "parent/checkpoints/last.ckpt"}
    child, whole = rates(config.changed(**longer), "child"), rates(config.changed(max_epochs=4), "whole")
    first = min(child)
    assert {step: child[step] for step in child if step > first} == {
        step: whole[step] for step in whole if step > first
    }
