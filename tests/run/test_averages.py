"""Averaged weights: what is measured is what is saved, constants stay constant, a resumed run is exact."""

import pytest
import torch
from lightning import Callback

from kvt import train
from kvt.tasks import ListTask
from tests.conftest import SMALL, SMALL_LISTS, slow
from tests.helpers.runs import checkpoint, equal, read_history, read_result, weights
from tests.run.test_one_run import killed_and_whole
from tests.run.test_overfit import small

EMA = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}}
CONSTANTS = [3, 7, 100]


class OwnBuffers(ListTask):
    """Has constants of a user's, of which checkpoints hold one, and a number that training changes."""

    def __init__(self, spec, attn="kv", dim=16):
        super().__init__(spec, attn, dim=dim)
        self.register_buffer("saved_constant", torch.tensor(CONSTANTS))
        self.register_buffer("constant", torch.tensor([0.1, 0.7]), persistent=False)
        self.register_buffer("trained", torch.tensor(0.0))

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.trained += 1


class Buffers(Callback):
    """Keeps the values of buffers in each validation, and before training."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer, pl_module):
        self.seen.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.on_fit_start(trainer, pl_module)


@pytest.mark.parametrize("config", ["reverse", *slow("cifar10", "translation")])
def test_constants_are_not_averaged(in_tmp_dir, config):
    kept = Buffers()
    train(small(config, callbacks=[EMA]), "mine", callbacks=[kept])
    assert len(kept.seen) > 2
    assert kept.seen[0]
    assert all(equal(kept.seen[0], seen) for seen in kept.seen)


def test_a_users_constants_are_not_averaged_and_buffers_that_training_changes_are(experiment):
    words = ["--model", f"{__name__}.OwnBuffers", *SMALL["reverse"], "--trainer.callbacks+=EMAWeightAveraging"]
    result = experiment("reverse", *words, "--trainer.callbacks.decay=0.9", "--max_epochs", "2")
    saved = checkpoint(result["path"].parent, "last")
    assert saved["state_dict"]["saved_constant"].tolist() == CONSTANTS
    assert 0 < saved["state_dict"]["trained"] < saved["current_model_state"]["trained"] == saved["global_step"]


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


def test_a_run_that_goes_on_from_an_average_says_so(experiment, kvt, capfd):
    flags = ["--trainer.callbacks+=EMAWeightAveraging", "--max_epochs", "1"]
    last = experiment("reverse", *SMALL_LISTS, *flags)["path"].parent / "checkpoints" / "last.ckpt"
    capfd.readouterr()
    kvt("fit", "--ckpt_path", str(last), "--max_epochs", "2")
    assert "goes on from averaged weights" in capfd.readouterr().err
    kvt("fit", "--ckpt_path", str(last), "--max_epochs", "2", "--trainer.callbacks+=EMAWeightAveraging")
    assert "average" not in capfd.readouterr().err
