"""What a run's history has besides its metrics."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

import kvt
from tests.helpers.runs import REVERSE


def test_learning_rate_and_gradient_norm_are_those_of_the_logged_step(in_tmp_dir):
    rates, norms = {}, {}

    def look(trainer, task, optimizer):
        gradients = [weight.grad.flatten() for weight in task.parameters() if weight.grad is not None]
        norms[trainer.global_step + 1] = torch.cat(gradients).norm().item()
        rates[trainer.global_step + 1] = optimizer.param_groups[0]["lr"]

    config = REVERSE.changed(log_every_n_steps=3, gradient_clip_val=0.01)
    history = kvt.train(config, test=False, callbacks=[LambdaCallback(on_before_optimizer_step=look)]).history
    logged = {row["step"]: row for row in history if "train/lr" in row}
    assert [*logged] == [3, 6]
    for step, row in logged.items():
        assert row["train/lr"] == pytest.approx(rates[step])
        assert row["train/grad_norm"] == pytest.approx(norms[step], rel=1e-5)
        assert row["train/grad_norm"] > 0.01  # before clipping
