"""A layer that a tool has wrapped or watches is called, in every attention and task."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory
from kvt.attention.ordinary import is_plain
from tests.helpers.small_tasks import OTHERS, TASKS, small_batch

LENGTH, DIM, HEADS = 4, 8, 2
OPTIONS = {
    **{name: (name, {}) for name in ATTENTION},
    "kv+pos, learned": ("kv+pos", {"pos": "learned", "per_head": True}),
    "qkv, bilinear": ("qkv", {"score": "bilinear"}),
    "qkv, additive": ("qkv", {"score": "additive"}),
    "mla, rope": ("mla", {"rope": 0.5}),
}
Loss = Callable[[nn.Module], Tensor]
WORDS = [*OTHERS["source_vocab"], *"bcdef"]


def attention(name: str) -> tuple[nn.Module, Loss]:
    attn, settings = OPTIONS[name]
    layer, x = AttentionFactory(attn, settings, heads=HEADS, max_len=LENGTH)(DIM), torch.randn(2, LENGTH, DIM)
    return layer, lambda layer: layer(x, causal=True).square().sum()


def task(name: str) -> tuple[nn.Module, Loss]:
    spec = OTHERS | {"source_vocab": WORDS, "target_vocab": WORDS}
    made = TASKS[name](spec=spec, attn="kv+pos", dim=DIM, depth=1, heads=HEADS)
    x, y, *others = small_batch(name)
    symbols = {"ImageTask": 256, "ListTask": 10, "TranslationTask": len(WORDS)}.get(name, 2)
    x = torch.randn(x.shape) if x.is_floating_point() else torch.randint(symbols, x.shape).to(x.dtype)
    batch = (x, y if y.ndim == 1 else torch.randint(symbols, y.shape), *others)
    return made, lambda made: made.compute_metrics(batch)["loss"]


SUBJECTS = {**dict.fromkeys(OPTIONS, attention), **dict.fromkeys([*TASKS], task)}


@pytest.fixture(params=SUBJECTS)
def subject(request) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    made, loss = SUBJECTS[request.param](request.param)
    return made.eval(), loss


class Adapter(nn.Module):
    """x Wᵀ + b + x Aᵀ Bᵀ, as LoRA adds it to a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        merged = copy.deepcopy(self.base)
        merged.weight.data += self.up.weight @ self.down.weight
        return merged


def replaced(module: nn.Module, kind: type[nn.Module], by: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a copy whose layers of a class are replaced."""
    module = copy.deepcopy(module)
    for parent in [*module.modules()]:
        for name, child in [*parent.named_children()]:
            if type(child) is kind:
                parent.add_module(name, by(child))
    return module


def test_an_adapter_on_every_linear_layer_acts_as_its_merged_weights_and_learns(subject):
    module, loss = subject
    adapted = replaced(module, nn.Linear, Adapter)
    assert_close(loss(adapted), loss(replaced(adapted, Adapter, Adapter.merged)))
    loss(adapted).backward()
    adapters = {name: p.grad for name, p in adapted.named_parameters() if ".up." in name or ".down." in name}
    assert adapters
    assert not [name for name, gradient in adapters.items() if gradient is None or not gradient.any()]


def test_a_model_can_be_pickled(subject):
    module, loss = subject
    model = getattr(module, "model", module)
    copied = pickle.loads(pickle.dumps(model))
    if model is not module:
        before, module.model = loss(module), copied
        assert_close(loss(module), before)
    else:
        assert_close(loss(copied), loss(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_it_compiles_whole(name):
    torch.compiler.reset()
    layer, loss = attention(name)
    assert_close(loss(torch.compile(layer, backend="eager", fullgraph=True)), loss(layer))


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "hook of gradients": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "weight norm": parametrizations.weight_norm,
    "other forward": lambda layer: setattr(layer, "forward", torch.sin),
    "other weight": lambda layer: setattr(layer, "weight", type("Int8", (nn.Parameter,), {})(layer.weight.data)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_linear_layer_that_a_tool_has_changed_is_not_plain(change):
    layer = nn.Linear(4, 4)
    assert is_plain(layer)
    CHANGES[change](layer)
    assert not is_plain(layer)
    assert not is_plain(Adapter(nn.Linear(4, 4)))
