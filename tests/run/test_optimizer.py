"""Another optimiser than Adam, by the path of its class."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from kvt.cli.lightning_cli import run_words
from kvt.cli.main import execute
from kvt.models.blocks import Stack
from kvt.run.config import RunConfig
from kvt.study.grid import TaskFile
from kvt.system.console import run
from kvt.system.files import CONFIGS
from kvt.tasks import ListTask
from kvt.tasks.base import make_optimizer
from kvt.tasks.optimizers import Together
from tests.conftest import QUIET, SMALL, SMALL_LISTS, slow
from tests.helpers.in_line import InLine
from tests.helpers.runs import checkpoint, equal, read_history, read_result, weights
from tests.helpers.small_tasks import TASKS, small_task
from tests.run.test_one_run import killed_and_whole
from tests.run.test_overfit import small

DECAYING = ["--optimizer", "torch.optim.AdamW", "--optimizer.weight_decay", "0.1"]
OWN_TASK = """
import torch
from kvt.tasks import ListTask

class Settled(ListTask):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""


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
    task.optimizer_config = {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}
    before = [parameter.detach().clone() for parameter in task.parameters()]
    for parameter in task.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(task).step()
    for old, new in zip(before, task.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), (1 - 0.5 * 0.1) * old)


def test_a_choice_of_implementation_replaces_the_fused_one(in_tmp_dir):
    task = ListTask({"vocab_size": 10, "length": 4}, dim=16, heads=2)
    for given, fused in (
        ({}, True),
        ({"foreach": True}, None),
        ({"foreach": False}, None),
        ({"differentiable": True}, None),
        ({"fused": False}, False),
    ):
        task.optimizer_config = {"class_path": "torch.optim.AdamW", "init_args": given}
        assert make_optimizer(task).defaults["fused"] is fused


@pytest.mark.parametrize("name", TASKS)
def test_muon_has_the_matrices_in_blocks_and_adam_all_else(name):
    task = small_task(name, attn="qkv")
    task.optimizer_config = {"class_path": "torch.optim.Muon", "init_args": {"weight_decay": 0.0}}
    muon, adam = make_optimizer(task).param_groups
    stacks = [module for module in task.modules() if isinstance(module, Stack)]
    layers = [layer for stack in stacks for layer in stack.modules() if isinstance(layer, nn.Linear)]
    assert {id(layer.weight) for layer in layers} == {*map(id, muon["params"])}
    assert len(muon["params"]) + len(adam["params"]) == len([*task.parameters()])


def test_two_optimisers_together_do_what_each_does_alone():
    """Through a schedule of all groups, and through saving and loading."""
    ours, theirs = ([nn.Parameter(torch.full((2, 2), value)) for value in (1.0, 2.0)] for _ in range(2))
    parts = [torch.optim.SGD(theirs[:1], lr=0.1, momentum=0.9), torch.optim.Adam(theirs[1:], lr=0.1)]

    def together():
        return Together(torch.optim.SGD(ours[:1], lr=0.1, momentum=0.9), torch.optim.Adam(ours[1:], lr=0.1))

    def gradients(weights):
        for weight in weights:
            weight.grad = weight.detach() ** 2

    one = together()
    for step in range(6):
        for optimizer in (one, *parts):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
        gradients(theirs)
        for part in parts:
            part.step()
        one.zero_grad()
        one.step(lambda: gradients(ours))
        saved = copy.deepcopy(one.state_dict())
        one = together()
        one.load_state_dict(saved)
    assert equal(dict(enumerate(ours)), dict(enumerate(theirs)))


def test_muon_trains_is_clipped_scheduled_noted_and_resumed(in_tmp_dir):
    settings = {"optimizer": {"class_path": "torch.optim.Muon", "init_args": {}}, "schedule": "one_cycle", "warmup": 0}
    config = small("reverse", **settings, gradient_clip_val=0.1, log_every_n_steps=1)
    killed, whole = killed_and_whole(config, in_tmp_dir)
    assert read_history(killed) == read_history(whole)
    assert all(equal(weights(killed, name), weights(whole, name)) for name in ("best", "last"))
    assert "torch.optim.Muon trains model.encoder.*.attention" in read_result(killed)["notes"]["optimizer"]
    rates = [float(row["train/lr"]) for row in read_history(whole) if row["train/lr"]]
    saved = [group["lr"] for group in checkpoint(whole, "last")["optimizer_states"][0]["param_groups"]]
    assert max(rates) > 2 * rates[-1]
    assert saved[0] == saved[1]


def test_a_run_goes_on_with_its_own_optimiser_alone(experiment, kvt, mistake):
    whole = experiment("reverse", *SMALL_LISTS, *DECAYING, "--max_epochs", "2")
    folder = whole["path"].parent
    assert whole["config"]["optimizer"] == {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}
    last = str(folder / "checkpoints" / "last.ckpt")
    told = mistake(kvt, "fit", "--ckpt_path", last, "--max_epochs", "3", "--optimizer", "torch.optim.SGD")
    assert "made with another optimizer: pass the run's own config.yaml" in told
    kvt("fit", "--ckpt_path", last, "--max_epochs", "3")
    continued = RunConfig.from_run(folder.with_name("version_1"))
    assert continued.optimizer == whole["config"]["optimizer"]
    straight = experiment("reverse", *SMALL_LISTS, *DECAYING, "--max_epochs", "2", "--seed", "1")["path"].parent
    kvt("test", "--ckpt_path", str(straight / "checkpoints" / "last.ckpt"))


def test_mistakes(mistake, in_tmp_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(in_tmp_dir))
    Path("settled_rate.py").write_text(OWN_TASK)

    def fit(*flags: str) -> None:
        run(lambda: run_words(["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, *flags]))

    assert "Invalid momentum value" in mistake(fit, "--optimizer", "SGD", "--optimizer.momentum", "-1")
    assert "SparseAdam does not support dense" in mistake(fit, "--optimizer", "SparseAdam")
    capturable = ["--optimizer", "Adadelta", "--optimizer.capturable", "true"]
    assert "--optimizer torch.optim.Adadelta: If capturable=True" in mistake(fit, *capturable)
    assert "'lr' is not accepted" in mistake(fit, "--optimizer", "SGD", "--optimizer.lr", "1")
    assert "subclass of Optimizer" in mistake(fit, "--optimizer", "torch.nn.Linear")
    assert "--optimizer: no class Mun: check the name" in mistake(fit, "--optimizer", "Mun")
    assert "--optimizer: Problem with given class_path 'no.Such'" in mistake(fit, "--optimizer", "no.Such")
    told = mistake(fit, "--callbacks+=EMAWeightAveragin")
    assert told.count("no class EMAWeightAveragin: check the name") == 1
    assert "Settled makes its own" in mistake(fit, "--model", "settled_rate.Settled", "--optimizer", "SGD")


def test_a_study_varies_it():
    """Each optimiser is another run."""
    task = TaskFile(CONFIGS / "reverse.yaml")
    settings = task.typed({"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"weight_decay": 0.1}}})
    decaying, plain, default = task.config(settings, 0), task.config({"optimizer": None}, 0), task.config({}, 0)
    assert decaying.name != plain.name == default.name


@pytest.mark.usefixtures("undrawn")
def test_a_study_keeps_it_in_its_record(says, in_tmp_dir, monkeypatch):
    monkeypatch.setattr("kvt.study.runner.LocalWorkers", lambda *_: InLine())
    Path("mine.yaml").write_text(
        "tasks: [reverse]\nseeds: [0]\n"
        "axes:\n  attn: [qkv, kv]\n  optimizer: [null, {class_path: torch.optim.SGD, init_args: {momentum: 0.9}}]\n"
        "  train_size: 32\n  val_size: 16\n  test_size: 16\n  batch_size: 16\n  dim: 16\n  max_epochs: 1\n"
    )
    execute("study run", ["mine.yaml", "--folder", "runs", "--workers", "1"])
    says("study", "record", "mine.yaml", "--from", "runs", "--out", "record")
    assert "4 runs: 4 finished" in says("study", "run", "mine.yaml", "--folder", "others", "--from", "record")
    assert not Path("others").exists()
    says("study", "report", "mine.yaml", "--from", "record", "--out", "report")
    assert Path("report", "runs.csv").read_text().count("torch.optim.SGD") == 2
