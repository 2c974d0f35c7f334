"""Training that continues from a checkpoint for longer has the schedule of the longer run."""

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim import Optimizer

import kvt
from tests.conftest import slow
from tests.run.test_overfit import small


def rates(config: kvt.RunConfig, folder: str) -> dict[int, float]:
    """Return the learning rate with which each step is made."""
    seen: dict[int, float] = {}
    look = LambdaCallback(on_before_optimizer_step=lambda trainer, _, o: seen.update({trainer.global_step: rate(o)}))
    kvt.train(config, folder, callbacks=[look], test=False)
    return seen


def rate(optimizer: Optimizer) -> float:
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("task", ["reverse", *slow("human_numbers", "language_model")])
def test_a_schedule_spans_the_longer_run(in_tmp_dir, task):
    config = small(task, max_epochs=2, batch_size=4, limit_train_batches=6, limit_val_batches=1)
    rates(config, "parent")
    longer = {"max_epochs": 4, "ckpt_path": "parent/checkpoints/last.ckpt"}
    child, whole = rates(config.changed(**longer), "child"), rates(config.changed(max_epochs=4), "whole")
    first = min(child)
    assert [one for one in child.items() if one[0] > first] == [one for one in whole.items() if one[0] > first]
