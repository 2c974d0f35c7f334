"""No model uses what it must predict, neither in training nor in validation; one that could is refused.

Layers: tests/attention/test_masks.py. Decoding token by token: tests/attention/test_cache.py and
tests/models/test_generation.py.
"""

import pytest
import torch
from torch import nn

from kvt.attention import ATTENTION, KV, QKV, AttentionFactory
from kvt.models import CausalLM, Seq2Seq
from kvt.models.embedding import LearnedPositions
from kvt.system import UserError
from kvt.tasks import CharacterTask, NumberTask, Task, TranslationTask
from kvt.tasks.causality import eval_mode
from tests.conftest import SMALL
from tests.helpers.small_models import DIM, HEADS, KINDS, MAX_LEN, PAD, SYMBOLS, factory, opinionated, padded, some


class Scratch(nn.Module):
    """Obeys, without a base class of kvt."""

    def __init__(self, dim, heads):
        super().__init__()
        self.value, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        scores = self.key(x) @ x.mT
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        return scores.softmax(-1) @ self.value(x)


class Mean(Scratch):
    """Ignores both `causal` and `mask`."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return self.value(x).mean(1, keepdim=True).expand_as(x)


class NoMask(QKV):
    """Ignores `mask`."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, causal=causal, cache=cache)


class NextOne(KV):
    """Attends to one token too many."""

    def attention_weights(self, q, k, mask, causal):
        weights = super().attention_weights(q, k, mask, causal)
        return (weights + weights.roll(1, -1)) / 2 if causal else weights


class Gated(KV):
    """Obeys until it has learned not to."""

    def __init__(self, dim, heads, **kwargs):
        super().__init__(dim, heads, **kwargs)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, mask=mask, causal=causal, cache=cache) + self.gate * x.mean(1, keepdim=True)


def mostly_slow(values, *default):
    """Parameters of which only the `default` ones are tried by default."""
    return [value if value in default else pytest.param(value, marks=pytest.mark.slow) for value in values]


OWN = f"{__name__}.Scratch"
EVERY_KIND = mostly_slow([*KINDS, OWN], "kv", "kv+pos, learned", "qkv, grouped", OWN)


def make(kind: str) -> AttentionFactory:
    if kind in KINDS:
        return factory(kind, dropout=0.3)
    return AttentionFactory(OWN, heads=HEADS)


def training_language_model(kind: str) -> CausalLM:
    embedding = LearnedPositions(SYMBOLS, DIM, MAX_LEN)
    return opinionated(CausalLM(make(kind), embedding, depth=2, dropout=0.2, feed_forward_dropout=0.1), seed=0).train()


def at_seed(model, *inputs):
    """The outputs in training mode, with the same dropout every time."""
    torch.manual_seed(3)
    return model(*inputs)


def embedded(embedding: nn.Module) -> list[torch.Tensor]:
    """Collect the outputs of an embedding, with their gradients."""
    seen: list[torch.Tensor] = []

    def collect(module, inputs, output):
        output.retain_grad()
        seen.append(output)

    embedding.register_forward_hook(collect)
    return seen


# ---- in training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_nothing_is_learned_from_later_tokens(kind):
    model, tokens = training_language_model(kind), some(2, MAX_LEN)
    seen = embedded(model.embedding)
    for place in range(1, MAX_LEN):
        other = tokens.clone()
        other[:, place:] = (other[:, place:] + 1) % SYMBOLS
        logits, changed = at_seed(model, tokens), at_seed(model, other)
        assert torch.allclose(logits[:, :place], changed[:, :place], rtol=0, atol=1e-12)
        assert (logits[:, place] - changed[:, place]).abs().max() > 1e-3
        logits[:, :place].square().sum().backward()
        gradient = seen[-2].grad
        assert (gradient[:, place:] == 0).all()
        assert gradient[:, :place].abs().max() > 1e-3


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_translator_learns_nothing_from_later_words_or_padding(kind):
    sizes = {"source_vocab_size": SYMBOLS, "target_vocab_size": SYMBOLS, "pad": PAD, "max_len": MAX_LEN, "dim": DIM}
    model = opinionated(Seq2Seq(make(kind), **sizes, depth=2, dropout=0.2), seed=0).train()
    source, target = padded([5, 1, 7, 3]), padded([4, 7, 2, 5], seed=1)
    read, written = embedded(model.source_embedding), embedded(model.target_embedding)
    for place in range(1, target.shape[1]):
        logits = at_seed(model, source, target)
        logits[:, :place].square().sum().backward()
        assert (written[-1].grad[:, place:] == 0).all()
        assert written[-1].grad[:, :place].abs().max() > 1e-3
        assert (read[-1].grad[source == PAD] == 0).all()
        assert (read[-1].grad[source != PAD].abs().amax(-1) > 0).all()


def translation(max_len: int) -> dict:
    words = ["<unk>", "<pad>", "<bos>", "<eos>", *"abcdefg"]
    rest = {"source_vocab": words, "target_vocab": words, "max_len": max_len}
    return {"source": "xx", "target": "xx", "detok_rules": [[], []], **rest}


# ---- a user's own attention ----------------------------------------------------------------------


def tasks(attn: type | str, length: int = 12) -> list[Task]:
    attn = attn if isinstance(attn, str) else f"{__name__}.{attn.__name__}"
    spec, sizes = {"vocab": list("abcde"), "length": length}, {"attn": attn, "dim": 16, "depth": 2, "heads": 2}
    translator = [TranslationTask(translation(length), **sizes)] if length > 2 else []  # <bos>, <eos> and a word
    return [CharacterTask(spec, **sizes), NumberTask(spec, **sizes), *translator]


@pytest.mark.parametrize("attn", [Mean, NextOne])
def test_an_attention_that_uses_later_tokens_is_refused(attn):
    for task in tasks(attn):
        with pytest.raises(UserError, match=f"attn={__name__}.{attn.__name__} .*`causal`"):
            task.check_causality()


def test_an_attention_that_uses_padding_is_refused_where_there_is_some():
    *language_models, translator = tasks(NoMask)
    for task in language_models:
        task.check_causality()
    with pytest.raises(UserError, match=f"attn={__name__}.NoMask .*`mask`"):
        translator.check_causality()


def test_it_is_refused_in_validation_if_it_has_learned_to_use_later_tokens(in_tmp_dir, experiment, capsys):
    """The first step opens its gate."""
    with pytest.raises(SystemExit):
        experiment("characters", *SMALL["characters"], "--attn", f"{__name__}.Gated", "--lr", "0.1")
    assert "causal" in capsys.readouterr().err.splitlines()[-1]
    assert list(in_tmp_dir.rglob("config.yaml"))  # it had begun to train
    assert not list(in_tmp_dir.rglob("result.json"))
    assert not list(in_tmp_dir.rglob("*.ckpt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attn", mostly_slow([*ATTENTION, OWN], "kv+pos", "qkv", OWN))
def test_an_attention_that_obeys_is_accepted(attn, dtype):
    """In any precision and at any length: rounding is no leak."""
    for length in (1, 2, 3, 100):
        for task in tasks(attn, length):
            task.to(dtype).check_causality()


def test_eval_mode_restores_every_module_and_draws_no_random_number():
    model = training_language_model("kv")
    model.encoder[0].eval()  # frozen by the user
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
        assert not model(some(1, 3)).requires_grad
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert model(some(1, 3)).requires_grad
