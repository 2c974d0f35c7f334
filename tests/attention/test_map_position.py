"""The positional encoding of the map equals the paper's formula, and needs no more memory than no positions."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.bench import allocations
from kvt.system import UserError
from tests.helpers.layers import MASKS, MAX_LEN, POSITIONED, SMALL, Case, cases, gradients, kinds_of_mask

pytestmark = pytest.mark.usefixtures("kernel")
pos_dims = st.sampled_from([3, 10, 20, 50])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
@settings(max_examples=12)
@given(case=cases(), pos_dim=pos_dims, kind=kinds_of_mask)
def test_it_is_the_papers_formula_in_value_and_every_gradient(name, pos, per_head, case, pos_dim, kind):
    setting = {"pos_dim": pos_dim, "pos": pos, "per_head": per_head}
    ours, literal = case.layer(name, **setting), case.layer(POSITIONED[name], **setting)
    x, masks = case.input().requires_grad_(), case.mask(kind)
    outputs = [layer(x, **masks) for layer in (ours, literal)]
    assert_close(*outputs)
    found = [gradients(y, x, *layer.parameters()) for y, layer in zip(outputs, (ours, literal), strict=True)]
    for parameter, our, their in zip(["x", *dict(ours.named_parameters())], *found, strict=True):
        assert_close(our, their, atol=1e-10, rtol=1e-6, msg=lambda difference, p=parameter: f"{p}: {difference}")


@pytest.mark.parametrize("name", POSITIONED)
@settings(max_examples=10)
@given(case=cases(), pos_dim=pos_dims)
def test_recorded_scores_are_the_formulas_with_the_terms_that_cancel(name, case, pos_dim):
    ours, literal = case.layer(name, pos_dim=pos_dim), case.layer(POSITIONED[name], pos_dim=pos_dim)
    q, k, _ = (t.repeat_interleave(case.heads // t.shape[1], 1) for t in literal.project(case.input()))
    for layer in (ours, literal):
        assert_close(layer.scores(case.input()), literal.logits(q, k))


@pytest.mark.parametrize("pos", ["sinusoid", "learned"])
@pytest.mark.parametrize("name", POSITIONED)
def test_a_sequence_longer_than_max_len_is_refused(name, pos):
    with pytest.raises(UserError, match=f"max_len={MAX_LEN}"):
        SMALL.layer(name, pos=pos)(SMALL.input(MAX_LEN + 1))


@pytest.mark.parametrize(
    ("name", "kinds", "attend_self"),
    [
        *((name, MASKS[:3], True) for name in (*POSITIONED, "kv+phase")),
        *((name, ["causal"], False) for name in ("qkv", "kv+pos", "kv+phase", "q-kv-deepseek")),
    ],
)
def test_the_fused_kernel_never_stores_a_map(name, kinds, attend_self):
    """Without self, a causal map is that of the kernel with one token less."""
    n = 512
    case = Case(heads=4, group=1, head_dim=8, batch=2, length=n, seed=0)
    layer = case.layer(name, max_len=n, pos_dim=50, attend_self=attend_self).float()
    x = case.input().float().requires_grad_()

    def step(masks):
        layer(x, **masks).sum().backward()

    for kind in kinds:
        assert max(allocations(partial(step, case.mask(kind)))) < 4 * n * n  # one float32 map of one head
    assert max(allocations(lambda: layer.weights(x, causal=True))) >= 4 * n * n
