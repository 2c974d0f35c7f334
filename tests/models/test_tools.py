"""Tools that find layers by calling them reach every weight of every attention and task."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory
from tests.helpers.small_tasks import LISTS, OTHERS, TASKS, small_batch

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
    name, _, option = name.partition(", ")
    spec = LISTS if name == "ListTask" else OTHERS | {"source_vocab": WORDS, "target_vocab": WORDS}
    spec = spec | {"compresses": True} if option else spec
    made = TASKS[name](spec=spec, attn="kv+pos", dim=DIM, depth=1, heads=HEADS)
    x, y, *others = small_batch(name)
    symbols = {"ImageTask": 256, "ListTask": 10, "TranslationTask": len(WORDS)}.get(name, 2)
    x = torch.randn(x.shape) if x.is_floating_point() else torch.randint(symbols, x.shape).to(x.dtype)
    batch = (x, y if y.ndim == 1 else torch.randint(symbols, y.shape), *others)
    return made, lambda made: made.compute_metrics(batch)["loss"]


SUBJECTS = {**dict.fromkeys(OPTIONS, attention), **dict.fromkeys([*TASKS, "RecallTask, compression"], task)}


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


def test_every_module_with_weights_is_called_if_a_hook_watches_it(subject):
    module, loss = subject
    leaves = {m: name for name, m in module.named_modules() if [*m.parameters(recurse=False)] and not [*m.children()]}
    called = set()
    for leaf in leaves:
        leaf.register_forward_hook(lambda leaf, *_: called.add(leaf))
    loss(module)
    assert not [name for leaf, name in leaves.items() if leaf not in called]


@pytest.mark.parametrize("tool", ["prune", "weight_norm"])
def test_a_weight_that_is_computed_from_others_trains_for_two_steps(subject, tool):
    module, loss = subject
    for layer in [m for m in module.modules() if isinstance(m, nn.Linear | nn.Embedding)]:
        if tool == "prune":
            prune.l1_unstructured(layer, "weight", 0.3)
        else:
            parametrizations.weight_norm(layer)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss(module))
        losses[-1].backward()
        optimizer.step()
    assert len({loss.item() for loss in losses}) == 3


def test_functional_call_uses_the_given_weights(subject):
    module, loss = subject
    other = {name: p + 0.1 for name, p in module.named_parameters()}
    called = torch.func.functional_call(_Loss(module, loss), {f"module.{name}": p for name, p in other.items()}, ())
    module.load_state_dict(other, strict=False)
    assert_close(called, loss(module))


class _Loss(nn.Module):
    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self) -> Tensor:
        return self.loss(self.module)
