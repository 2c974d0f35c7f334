"""An optimiser with modes evaluates other weights than it trains: those are measured, shown and saved."""

import os
from pathlib import Path
from signal import SIGTERM

import lightning as L
import pytest
import torch
from torch.optim import Optimizer

import kvt
from kvt.run.pictures import Shown
from tests.conftest import slow
from tests.helpers.runs import checkpoint, equal, read_history, read_result, weights
from tests.run.test_one_run import killed_and_whole
from tests.run.test_overfit import small

BETA = 0.9


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): trains y = β x + (1 − β) z, where x is the mean of all z."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "train_mode": False, "steps": 0})

    @torch.no_grad()
    def switch(self, train_mode: bool, part: float) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["train_mode"] != train_mode else ():
                weight.lerp_(self.state[weight].get("z", weight), part)
            group["train_mode"] = train_mode

    def train(self) -> None:
        self.switch(True, 1 - BETA)

    def eval(self) -> None:
        self.switch(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            for weight in group["params"]:
                z = self.state[weight].setdefault("z", weight.clone())
                weight.lerp_(z, 1 / group["steps"])
                weight.sub_(weight.grad, alpha=group["lr"] * (1 - BETA * (1 - 1 / group["steps"])))
                z.sub_(weight.grad, alpha=group["lr"])
        return loss


class Sees(L.Callback):
    """Keeps a copy of the weights that each phase last saw; stops the run after so many steps."""

    def __init__(self, stop_at: int = 0) -> None:
        self.seen, self.stop_at = {}, stop_at

    def see(self, phase, task):
        self.seen[phase] = {name: weight.clone() for name, weight in task.state_dict().items()}

    def on_train_batch_end(self, trainer, task, *args):
        self.see("train", task)
        if trainer.global_step == self.stop_at:
            os.kill(os.getpid(), SIGTERM)

    def on_validation_batch_end(self, trainer, task, *args):
        self.see("val", task)

    def on_test_batch_end(self, trainer, task, *args):
        self.see("test", task)


SETTINGS = {"schedule": "constant", "warmup": 0, "lr": 0.1, "log_every_n_steps": 1}
SETTINGS["optimizer"] = {"class_path": f"{__name__}.ScheduleFree"}


def stopped_and_resumed(config: kvt.RunConfig, folder: Path, at: int) -> None:
    """Make a run that is stopped by a signal after a step, and resumed."""
    with pytest.raises(SystemExit):
        kvt.train(config, folder, callbacks=[Sees(at)])
    assert checkpoint(folder, "last")["global_step"] == at
    kvt.train(config, folder, resume=True)


def test_weights_of_mode_eval_are_measured_shown_and_saved(in_tmp_dir, monkeypatch):
    sees, folder = Sees(), in_tmp_dir / "mine"
    monkeypatch.setattr(Shown, "show_maps", lambda self, loggers, task, trainer: sees.see("shown", task))
    kvt.train(small("reverse", **SETTINGS, max_epochs=2), folder, callbacks=[sees])
    assert equal(sees.seen["val"], weights(folder, "last"))
    assert equal(sees.seen["shown"], weights(folder, "last"))
    assert equal(sees.seen["test"], weights(folder, "best"))
    assert not equal(sees.seen["train"], sees.seen["val"])


def test_without_validation_the_weights_of_mode_eval_are_tested(in_tmp_dir):
    sees, folder = Sees(), in_tmp_dir / "mine"
    kvt.train(small("reverse", **SETTINGS, limit_val_batches=0), folder, callbacks=[sees])
    assert equal(sees.seen["test"], weights(folder, "last"))
    assert not equal(sees.seen["train"], sees.seen["test"])


@pytest.mark.parametrize(("task", "precision"), [("reverse", "32-true"), *slow(("characters", "bf16-true"))])
def test_a_run_that_was_killed_or_stopped_goes_on_exactly(in_tmp_dir, task, precision):
    config = small(task, **SETTINGS, precision=precision)
    killed, whole = killed_and_whole(config, in_tmp_dir)
    stopped = in_tmp_dir / "stopped"
    stopped_and_resumed(config, stopped, at=2)
    for run in (killed, stopped):
        assert read_history(run) == read_history(whole)
        assert read_result(run).get("test/loss") == read_result(whole).get("test/loss")
        assert all(equal(weights(run, name), weights(whole, name)) for name in ("best", "last"))


def test_a_stopped_run_has_saved_the_weights_of_both_modes(in_tmp_dir):
    sees = Sees(stop_at=2)
    with pytest.raises(SystemExit):
        kvt.train(small("reverse", **SETTINGS), in_tmp_dir / "mine", callbacks=[sees])
    saved = checkpoint(in_tmp_dir / "mine", "last")
    assert equal(saved["training_weights"], sees.seen["train"])
    for z, (name, x) in zip(saved["optimizer_states"][0]["state"].values(), saved["state_dict"].items(), strict=True):
        torch.testing.assert_close(torch.lerp(x, z["z"], 1 - BETA), saved["training_weights"][name])
