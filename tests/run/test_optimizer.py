"""Another optimiser than Adam, by the path of its class."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig, read_configs
from kvt.run.fit import train
from kvt.tasks import ListTask
from kvt.tasks.base import make_optimizer
from tests.conftest import QUIET, SMALL, SMALL_LISTS, slow
from tests.helpers.runs import equal, read_result, weights

DECAYING = ["--optimizer", "torch.optim.AdamW", "--optimizer.weight_decay", "0.1"]


@pytest.mark.parametrize("config", ["reverse", *slow("human_numbers", "cifar10", "anomaly", "characters")])
def test_adam_by_name_is_the_default(experiment, config):
    limits = ["--max_epochs", "1", "--limit_train_batches", "3"]
    default, named, other = (
        experiment(config, *SMALL[config], *limits, *flags)["path"].parent
        for flags in ([], ["--optimizer", "Adam"], ["--optimizer", "torch.optim.Adagrad"])
    )
    assert equal(weights(default, "last"), weights(named, "last"))
    assert not equal(weights(default, "last"), weights(other, "last"))


def test_decay_is_decoupled(in_tmp_dir):
    """A step at rate η without gradients leaves (1 − η λ) of the weights."""
    task = ListTask({"vocab_size": 10, "length": 4}, dim=16, heads=2, lr=0.5)
    task.run_config = {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}}
    before = [parameter.detach().clone() for parameter in task.parameters()]
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(task).step()
    for old, new in zip(before, task.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), (1 - 0.5 * 0.1) * old)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("SGD --optimizer.momentum 0.3", 0.3),
        ("SGD --optimizer.momentum 0", 0),
        ("Adam --optimizer.betas [0.8,0.98]", (0.8, 0.98)),
        ("RMSprop --optimizer.momentum 0.5", 0.5),
        ("AdamW --optimizer.weight_decay 0.1", None),
    ],
)
def test_one_cycle_keeps_the_momentum_that_is_asked_for_or_tells_that_it_varies(in_tmp_dir, flags, kept):
    words = [*SMALL_LISTS, *QUIET, "--max_epochs", "1", "--schedule", "one_cycle", "--warmup", "0"]
    built = KvtCLI(read_configs(["reverse"]), [*words, "--optimizer", *flags.split()])
    seen = set()

    def look(trainer, task, optimizer):
        group = optimizer.param_groups[0]
        seen.add(group.get("betas", group.get("momentum")))

    result = train(built, callbacks=[LambdaCallback(on_before_optimizer_step=look)])
    assert (seen == {kept}) is (kept is not None)
    assert ("momentum" in read_result(result.folder)["notes"]) is (kept is None)


def test_a_run_goes_on_with_its_own_optimiser_alone(experiment, kvt, mistake):
    whole = experiment("reverse", *SMALL_LISTS, *DECAYING, "--max_epochs", "2")
    folder = whole["path"].parent
    assert whole["config"]["optimizer"] == {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}
    last = str(folder / "checkpoints" / "last.ckpt")
    words = ["fit", "--ckpt_path", last, "--max_epochs", "3", "--optimizer", "torch.optim.SGD"]
    assert "optimizer" in mistake(kvt, *words)
    kvt("fit", "--ckpt_path", last, "--max_epochs", "3")
    continued = RunConfig.from_run(folder.with_name("version_1"))
    assert continued.optimizer == whole["config"]["optimizer"]
