"""Exported attentions take any batch and any length, in torch and in ONNX Runtime."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory
from tests.conftest import slow

MAX_LEN, DIM = 300, 8
FAST = ("qkv", "kv+pos", "mla", "q-kv-deepseek", "kv, no self", "qkv, grouped")
OPTIONS = {
    **{name: (name, {}) for name in ATTENTION},
    **{f"{name}, no self": (name, {"attend_self": False}) for name in ATTENTION if name != "identity"},
    "kv+pos, learned": ("kv+pos", {"pos": "learned", "per_head": True}),
    "qkv, grouped": ("qkv", {"kv_heads": 1, "rope": 1.0}),
    "qkv, additive": ("qkv", {"score": "additive"}),
}


def shapes(longest: int = MAX_LEN) -> tuple[dict, dict]:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=1, max=longest)}
    return axes, axes


class Padded(nn.Module):
    """Attention of tokens, (B, N, dim), of which some are padding: boolean (B, N), True for tokens."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        attn, settings = OPTIONS[name]
        self.attention = AttentionFactory(attn, settings, heads=2, max_len=MAX_LEN)(DIM).eval()
        self.causal = causal

    def forward(self, x, real):
        return self.attention(x, mask=real[:, None, None], causal=self.causal)


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, length, DIM), torch.arange(length) < torch.randint(length + 1, (batch, 1))


@pytest.mark.parametrize(("name", "causal"), [*product(FAST, [True]), *slow(*product(OPTIONS, [False, True]))])
@torch.no_grad()
def test_torch_exports_it_for_all_lengths(name, causal):
    layer = Padded(name, causal)
    longest = MAX_LEN - ("learned" in name)  # all of a table is a special case to torch.export
    program = torch.export.export(layer, inputs(2, 12), dynamic_shapes=shapes(longest)).module()
    for batch, length in ((1, 1), (3, 5), (2, 150), (1, longest)):
        given = inputs(batch, length)
        assert_close(program(*given), layer(*given), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"), [*((name, False) for name in OPTIONS), ("kv", True), ("kv+pos", True), ("kv, no self", True)]
)
@torch.no_grad()
def test_onnx_runtime_runs_it_for_all_lengths(name, causal, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = Padded(name, causal).eval()
    program = torch.onnx.export(layer, inputs(2, 12), dynamo=True, verbose=False, dynamic_shapes=shapes(MAX_LEN - 1))
    program.save(tmp_path / "layer.onnx")
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    names = [found.name for found in session.get_inputs()]
    for batch, length in ((1, 1), (3, 5), (2, 150)):
        given = inputs(batch, length)
        (found,) = session.run(None, {name: t.numpy() for name, t in zip(names, given, strict=True)})
        assert_close(torch.as_tensor(found), layer(*given), atol=1e-5, rtol=1e-4)
