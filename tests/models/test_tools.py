"""Tools that find layers by calling them reach every weight of every attention and task.

The table of tools in the guide to attention is that of `TOOLS`.
"""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import device_mesh, fsdp
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import kvt
from kvt.attention import ATTENTION, AttentionFactory, MultiheadAttention
from tests.conftest import REPOSITORY, SMALL
from tests.helpers.small_tasks import LISTS, OTHERS, TASKS, small_batch

LENGTH, DIM, HEADS = 4, 8, 2
OPTIONS = {
    **{name: (name, {}) for name in ATTENTION},
    "kv+pos, learned": ("kv+pos", {"pos": "learned", "per_head": True}),
    "qkv, bilinear": ("qkv", {"score": "bilinear"}),
    "qkv, additive": ("qkv", {"score": "additive"}),
    "mla, rope": ("mla", {"rope": 0.5}),
}
SUM = "a projection that stays whole has the gradient of one process's heads: add them up"
TOOLS = [  # tool, whether it works, how, its limit, and the test
    (
        *("LoRA (peft)", "yes", '`LoraConfig(target_modules="all-linear")`'),
        "merging changes a tied embedding, too",
        "models/test_tools.py::test_lora",
    ),
    ("int8 (torchao)", "yes", "`quantize_(model, Int8WeightOnlyConfig())`", "", "models/test_tools.py::test_int8"),
    (
        "int8 (torch)",
        "yes",
        "`quantize_dynamic(model, {nn.Linear})`",
        "no gradients",
        "models/test_tools.py::test_dynamic",
    ),
    ("pruning", "yes", "`torch.nn.utils.prune`", "", "models/test_tools.py::test_a_weight_that_is_computed"),
    (
        *("weight norm", "yes", "`torch.nn.utils.parametrizations`"),
        "`torch.nn.utils.weight_norm`, a hook, is refused where a model sets initial weights",
        "models/test_models.py::test_initial_weights_go",
    ),
    ("`torch.func`", "yes", "`functional_call`, `vmap`", "", "models/test_tools.py::test_functional_call"),
    ("hooks", "yes", "`register_forward_hook`, captum, torchinfo", "", "models/test_tools.py::test_every_module"),
    (
        "pickle",
        "yes",
        "`torch.save(model)`, spawned processes",
        "",
        "models/test_tools.py::test_a_model_can_be_pickled",
    ),
    ("FSDP 2", "yes", "`fully_shard` of single layers or of the model", "", "models/test_tools.py::test_fully_shard"),
    (
        *("tensor parallelism", "yes", "`ColwiseParallel` of `projection.*`, `RowwiseParallel` of `output`"),
        f"`x-kv`, and phases or positions of each head, are refused; {SUM}",
        "attention/test_tensor_parallel.py::test_sharded_heads",
    ),
    ("`torch.compile`", "yes", "`fullgraph=True`", "", "models/test_tools.py::test_it_compiles_whole"),
    (
        *("`torch.export`", "yes", '`Dim("length", min=1, max=max_len)`'),
        "with `pos: learned` up to `max_len` − 1",
        "attention/test_exported.py::test_torch_exports_it",
    ),
    ("ONNX Runtime", "yes", "`torch.onnx.export(…, dynamo=True)`", "as above", "attention/test_exported.py::test_onnx"),
    (
        "`torch.jit`",
        "trace only",
        "`torch.jit.trace`, fvcore",
        "no `script`",
        "models/test_tools.py::test_it_is_traced",
    ),
    ("`torch.fx`", "no", "`torch.export`", "`symbolic_trace` cannot follow shapes", "models/test_tools.py::test_fx"),
]
Loss = Callable[[nn.Module], Tensor]
WORDS = [*OTHERS["source_vocab"], *"bcdef"]


def attention(name: str) -> tuple[nn.Module, Loss]:
    attn, settings = OPTIONS[name]
    layer, x = AttentionFactory(attn, settings, heads=HEADS, max_len=LENGTH)(DIM), torch.randn(2, LENGTH, DIM)
    return layer, lambda layer: layer(x, causal=True).square().sum()


def task(name: str) -> tuple[nn.Module, Loss]:
    spec = LISTS if name == "ListTask" else OTHERS | {"source_vocab": WORDS, "target_vocab": WORDS}
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


def test_a_model_can_be_pickled(subject):
    module, loss = subject
    model = getattr(module, "model", module)
    copied = pickle.loads(pickle.dumps(model))
    if model is not module:
        before, module.model = loss(module), copied
        assert_close(loss(module), before)
    else:
        assert_close(loss(copied), loss(model))


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


def with_model(module: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Change the model of a task, or a layer."""
    if not hasattr(module, "model"):
        return change(module)
    module.model = change(module.model)
    return module


@pytest.mark.slow
def test_lora(subject):
    peft = pytest.importorskip("peft")
    module, loss = subject
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    wrapped = peft.get_peft_model(getattr(module, "model", module), config)
    module = with_model(module, lambda _: wrapped.base_model.model)
    before = loss(module)
    before.backward()
    adapters = {name: p.grad for name, p in module.named_parameters() if "lora_" in name}
    assert adapters
    assert not [name for name, gradient in adapters.items() if gradient is None or not gradient.any()]
    head, embedding = (getattr(module, "model", module)._modules.get(name) for name in ("head", "embedding"))
    if embedding is None or head.weight is not embedding.tokens.weight:
        assert_close(loss(with_model(module, lambda _: wrapped.merge_and_unload())), before)


@pytest.mark.slow
@torch.no_grad()
def test_int8(subject):
    quantization = pytest.importorskip("torchao.quantization")
    module, loss = subject
    before = loss(module)
    quantization.quantize_(getattr(module, "model", module), quantization.Int8WeightOnlyConfig())
    assert_close(loss(module), before, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_dynamic(subject):
    module, loss = subject
    before = loss(module)
    quantized = with_model(module, lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}))
    assert_close(loss(quantized), before, rtol=0.05, atol=0.05)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_shard(subject, one_process):
    module, loss = subject
    before = loss(module)
    for part in [*module.modules()]:
        if [*part.parameters(recurse=False)] and not [*part.children()]:
            fsdp.fully_shard(part, mesh=one_process)
    assert_close(loss(module), before)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_shard_in_half_precision(one_process):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    layer, x = MultiheadAttention(DIM, HEADS, attn="kv", batch_first=True), torch.randn(2, LENGTH, DIM)
    expected = layer(x, x, x)[0]
    fsdp.fully_shard(layer, mesh=one_process, mp_policy=policy)  # casts each argument
    assert_close(layer(x, x, x)[0].float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_it_compiles_whole(name):
    torch.compiler.reset()
    layer, loss = attention(name)
    assert_close(loss(torch.compile(layer, backend="eager", fullgraph=True)), loss(layer))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore")
def test_it_is_traced(name):
    layer, x = attention(name)[0].eval(), torch.randn(2, LENGTH, DIM)
    assert_close(torch.jit.trace(layer, (x,))(x), layer(x))


def test_fx():
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(attention("kv")[0])


def test_the_guide_has_the_table():
    lines = ["| tool | works | how | limit |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row[:4])} |".replace("|  |", "| |") for row in TOOLS]
    assert "\n".join(lines) in (REPOSITORY / "docs/guides/attention.md").read_text(encoding="utf-8")
    for *_, test in TOOLS:
        path, name = test.split("::")
        assert f"def {name}" in (REPOSITORY / "tests" / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_guides_script_trains_adapters_alone(experiment, in_tmp_dir):
    peft = pytest.importorskip("peft")
    experiment("reverse", "--attn", "kv", *SMALL["reverse"])
    blocks = re.findall(r"```py\n(.*?)```", (REPOSITORY / "docs/guides/attention.md").read_text(), re.DOTALL)
    [script] = [block for block in blocks if "peft" in block]
    names = {}
    exec(compile(script.replace("50_000", "256"), "attention.md", "exec"), names)
    before, after = kvt.load("lightning_logs/reverse/kv/version_0"), kvt.load("sort.ckpt")
    digits = torch.randint(10, (3, 16))
    adapted = peft.PeftModel.from_pretrained(before.model, "sort-adapters").eval()
    assert_close(adapted(digits), after.model(digits))
    with adapted.disable_adapter():
        assert not torch.equal(adapted(digits), after.model(digits))
    start, trained = kvt.load("lightning_logs/reverse/kv/version_0"), after.state_dict()
    changed = {name for name, weight in start.state_dict().items() if not torch.equal(weight, trained[name])}
    assert changed == {f"{name}.weight" for name, layer in start.named_modules() if isinstance(layer, nn.Linear)}
