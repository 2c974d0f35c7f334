"""Training that replays CUDA graphs is the same training; on a CPU a stand-in holds to the rules of graphs."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvt.attention import ATTENTION
from kvt.models.blocks import Stack
from kvt.run import graphs
from kvt.run.graphs import Graphed, graph_model, require_graphs
from kvt.system.errors import UserError
from tests.conftest import SMALL
from tests.helpers.eager_graphs import EagerGraphs
from tests.helpers.small_tasks import TASKS, small_batch, small_task


@pytest.fixture
def replayed(monkeypatch):
    """Let a CPU have graphs; return the stand-in, which counts."""
    monkeypatch.setattr(graphs, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", stand_in := EagerGraphs())
    return stand_in


def one_device(**settings):
    settings = {"world_size": 1, "accumulate_grad_batches": 1, "device": "cpu"} | settings
    return SimpleNamespace(**settings, strategy=SimpleNamespace(root_device=torch.device(settings["device"])))


def trained(task, name, rows, autocast=False):
    """Return the losses of steps with so many rows each, and the weights and the random number after them."""
    torch.manual_seed(0)
    task.train()
    optimizer, losses = torch.optim.SGD(task.parameters(), lr=0.1), []
    for count in rows:
        with torch.autocast("cpu", enabled=autocast):
            loss = task.training_step(small_batch(name, count), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *task.parameters(), torch.rand(1)]


def require_equal(name, replayed, rows=(3, 3, 2, 3, 1, 2), autocast=False, **settings):
    eager = small_task(name, dropout=0.5, **settings)
    graphed = deepcopy(eager)
    graph_model(graphed.model)
    for ours, theirs in zip(*(trained(task, name, rows, autocast) for task in (graphed, eager)), strict=True):
        torch.testing.assert_close(ours, theirs)
    return replayed.replays, [type(module) for module in replayed.captured]


STATES = ("CharacterTask", "LanguageModelTask", "NumberTask", "RecallTask")
"""Tasks whose loss calls the last layer itself, or a chunk of it at a time."""


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"TranslationTask", *STATES}))
def test_the_same_training_of_a_task(name, replayed):
    replays, captured = require_equal(name, replayed)
    assert not issubclass(captured[0], Stack)
    assert replays >= 5  # the batch of one row is of a third shape


@pytest.mark.parametrize("name", STATES)
def test_a_loss_that_does_not_call_the_model_has_graphs_of_its_blocks(name, replayed):
    _, captured = require_equal(name, replayed)
    assert captured
    assert all(issubclass(kind, Stack) for kind in captured)


@pytest.mark.parametrize("attn", ATTENTION)
def test_the_same_training_with_an_attention(attn, replayed):
    replays, _ = require_equal("CharacterTask", replayed, (2, 2, 2), attn=attn)
    assert replays == 3


def test_the_same_training_in_bfloat16(replayed):
    replays, _ = require_equal("CharacterTask", replayed, (2, 2, 2), autocast=True)
    assert replays == 3


def graphed(module):
    module.forward = Graphed(module)
    return module


def test_capturing_leaves_no_trace(replayed):
    eager = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    ours, x = graphed(deepcopy(eager)), torch.randn(4, 2)
    for module in (ours, eager):
        torch.manual_seed(0)
        module(x)
        module.seen = [*module.state_dict().values(), torch.rand(1)]
    assert replayed.replays == 1
    for mine, theirs in zip(ours.seen, eager.seen, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_two_calls_before_a_gradient_are_both_right(replayed):
    ours = graphed(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    eager, (x, y) = deepcopy(ours), torch.randn(2, 4, 2)
    del eager.forward
    for _ in range(2):
        for module in (ours, eager):
            module.zero_grad()
            (module(x).sum() - 3 * module(y).sum()).backward()
        for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert replayed.replays == 2


def test_evaluation_runs_as_ever(replayed):
    module, x = graphed(nn.Linear(2, 1)), torch.randn(4, 2)
    with torch.no_grad():
        module(x)
    module.eval()(x)
    assert not replayed.replays


def test_what_no_graph_can_repeat_is_named(monkeypatch):
    def refuse(*args, **settings):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    module = graphed(nn.Linear(2, 1))
    with pytest.raises(UserError, match=r"^--compile graph: operation not permitted .*: drop the flag$"):
        module(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "meta"}, "--compile graph: needs one GPU: drop the flag"),
        ({"world_size": 2}, "--compile graph: needs one GPU: drop the flag"),
        ({"accumulate_grad_batches": 2}, "--compile graph: drop the flag, or --accumulate_grad_batches"),
    ],
)
def test_what_a_run_cannot_combine(settings, message, replayed):
    with pytest.raises(UserError, match=message):
        require_graphs(one_device(**settings))


def test_a_whole_run_is_the_same(experiment, replayed):
    flags = [*SMALL["reverse"], "--dropout", "0.1"]
    plain = experiment("reverse", *flags)
    run = experiment("reverse", *flags, "--compile", "graph")
    assert replayed.replays > 1
    assert run["config"]["compile"] == "graph"
    for score in ("val/loss", "test/loss"):
        assert run[score] == pytest.approx(plain[score], rel=1e-4)


def test_a_cpu_has_none(mistake, experiment):
    message = mistake(experiment, "reverse", *SMALL["reverse"], "--compile", "graph")
    assert message == "error: --compile graph: needs one GPU: drop the flag"
