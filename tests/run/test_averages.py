"""Averaged weights: what is measured is what is saved, and a resumed run is exact."""

import pytest
import torch

from kvt import train
from tests.conftest import slow
from tests.helpers.runs import checkpoint, equal, read_history, read_result, weights
from tests.helpers.small_tasks import TASKS, small_task
from tests.run.test_one_run import killed_and_whole
from tests.run.test_overfit import small

EMA = {
    "class_path": "lightning.pytorch.callbacks.EMAWeightAveraging",
    "init_args": {"decay": 0.9, "use_buffers": False},
}


@pytest.mark.parametrize("name", TASKS)
def test_an_average_truncates_no_integers(name):
    assert all(buffer.is_floating_point() for buffer in small_task(name).buffers())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", *slow("64-true", "bf16-mixed")])
def test_a_killed_run_goes_on_with_its_average(in_tmp_dir, precision):
    config = small("reverse", attn="kv+phase", precision=precision, callbacks=[EMA], log_every_n_steps=1)
    killed, whole = killed_and_whole(config, in_tmp_dir)
    assert read_result(killed)["test/loss"] == read_result(whole)["test/loss"]
    assert read_history(killed) == read_history(whole)
    assert all(equal(weights(killed, name), weights(whole, name)) for name in ("best", "last"))
    average = next(weight for weight in weights(whole, "last").values() if weight.is_floating_point())
    assert average.dtype == (torch.float64 if precision == "64-true" else torch.float32)


def test_a_last_validation_amid_an_epoch_leaves_the_trained_weights_in_the_checkpoint(in_tmp_dir):
    train(small("reverse", callbacks=[EMA], max_epochs=1, val_check_interval=4), "mine")
    saved = checkpoint(in_tmp_dir / "mine", "last")
    assert saved["global_step"] == 6
    assert not equal(saved["state_dict"], saved["current_model_state"])
