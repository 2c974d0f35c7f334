"""No model sees what it is to predict: not while it trains, not as it is judged; one that could is refused.

Layers: tests/attention/test_masks.py. Models in eval mode: tests/models/test_language_models.py. Decoding token by
token: tests/attention/test_cache.py and tests/models/test_generation.py.
"""

import pytest
import torch
from torch import nn

from kvt.attention import ATTENTION, KV, QKV, AttentionFactory, kernels
from kvt.models import CausalLM, Seq2Seq
from kvt.models.embedding import LearnedPositions
from kvt.system.errors import UserError
from kvt.tasks import CharacterTask, NumberTask, TranslationTask
from kvt.tasks.causality import eval_mode
from tests.conftest import SMALL
from tests.helpers.small_models import DIM, HEADS, KINDS, MAX_LEN, PAD, SYMBOLS, factory, opinionated, padded, some


class Near(KV):
    """Of the user's own, by a bias of the map."""

    def gain_and_bias(self, n, m):
        position = torch.arange(m)
        return None, -0.3 * (position[m - n :, None] - position).abs().double()


class Scratch(nn.Module):
    """Of the user's own, from nothing."""

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
    """Obeys nothing."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return self.value(x).mean(1, keepdim=True).expand_as(x)


class NoMask(QKV):
    """Obeys `causal` alone."""

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, causal=causal, cache=cache)


class NextOne(KV):
    """Sees one token too many."""

    def attention_weights(self, q, k, mask, causal):
        weights = super().attention_weights(q, k, mask, causal)
        return (weights + weights.roll(1, -1)) / 2 if causal else weights


class Late(QKV):
    """Obeys in all but the longest of texts."""

    def __init__(self, dim, heads, *, max_len, **kwargs):
        super().__init__(dim, heads, **kwargs)
        self.longest = max_len

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        out = super().forward(x, context, mask=mask, causal=causal, cache=cache)
        return out + x.roll(-1, 1) if causal and x.shape[1] == self.longest else out


class Gated(KV):
    """Obeys until it has learned not to."""

    def __init__(self, dim, heads, **kwargs):
        super().__init__(dim, heads, **kwargs)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x, context=None, *, mask=None, causal=False, cache=None):
        return super().forward(x, mask=mask, causal=causal, cache=cache) + self.gate * x.mean(1, keepdim=True)


OWN = {f"own {cls.__name__}": f"{__name__}.{cls.__name__}" for cls in (Near, Scratch)}


@pytest.fixture(params=["fused", "small maps"])
def kernel(request, monkeypatch):
    """Through the fused kernel, and where small maps are made."""
    if request.param == "fused":
        monkeypatch.setattr(kernels, "SMALL_MAP", dict.fromkeys(kernels.SMALL_MAP, 0))


def make(kind: str) -> AttentionFactory:
    if kind in KINDS:
        return factory(kind, dropout=0.3)
    return AttentionFactory(OWN[kind], heads=HEADS, max_len=MAX_LEN, dropout=0.3)


def training_language_model(kind: str) -> CausalLM:
    dropouts = {"dropout": 0.2, "feed_forward_dropout": 0.1}
    return opinionated(
        CausalLM(make(kind), LearnedPositions(SYMBOLS, DIM, MAX_LEN), depth=2, **dropouts), seed=0
    ).train()


def training_translator(kind: str) -> Seq2Seq:
    sizes = {"source_vocab_size": SYMBOLS, "target_vocab_size": SYMBOLS, "pad": PAD, "max_len": MAX_LEN, "dim": DIM}
    return opinionated(Seq2Seq(make(kind), **sizes, depth=2, dropout=0.2), seed=0).train()


def at_seed(model, *inputs):
    """What comes out while training, the same weights dropped every time."""
    torch.manual_seed(3)
    return model(*inputs)


def embedded(embedding: nn.Module) -> list[torch.Tensor]:
    """Collects what an embedding makes of its tokens, with the gradients that come back to it."""
    seen: list[torch.Tensor] = []

    def collect(module, inputs, output):
        output.retain_grad()
        seen.append(output)

    embedding.register_forward_hook(collect)
    return seen


# ---- while training ------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [*KINDS, *OWN])
def test_nothing_is_learned_from_the_future(kind):
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


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", [*KINDS, *OWN])
def test_no_word_is_learned_from_later_ones_or_from_padding(kind):
    model, source, target = training_translator(kind), padded([5, 1, 7, 3]), padded([4, 7, 2, 5], seed=1)
    read, written = embedded(model.source_embedding), embedded(model.target_embedding)
    for place in range(1, target.shape[1]):
        logits = at_seed(model, source, target)
        logits[:, :place].square().sum().backward()
        assert (written[-1].grad[:, place:] == 0).all()
        assert written[-1].grad[:, :place].abs().max() > 1e-3
        assert (read[-1].grad[source == PAD] == 0).all()
        assert (read[-1].grad[source != PAD].abs().amax(-1) > 0).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_of_a_sentence_does_not_depend_on_how_far_it_is_filled_up(kind):
    spec = {**translation("abcdefg"), "max_len": MAX_LEN}
    name, asked = KINDS[kind]
    task = TranslationTask(spec, name, asked, dim=DIM, depth=2, heads=HEADS, pos_dim=6, dropout=0.0)
    opinionated(task, seed=0).train()
    gradients = []
    for more in (0, 2):
        batch = [nn.functional.pad(sentences(seed), (0, more), value=1) for seed in (0, 1)]
        task.zero_grad()
        measured = task.compute_metrics((*batch, torch.arange(3)))
        measured["loss"].backward()
        gradients.append(
            [measured["loss"].detach(), *(p.grad.clone() for p in task.parameters() if p.grad is not None)]
        )
    assert len(gradients[0]) > 20
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def translation(letters: str) -> dict:
    """What a task of translation must know, but for the longest sentence."""
    words = ["<unk>", "<pad>", "<bos>", "<eos>", *letters]
    return {"source": "xx", "target": "xx", "detok_rules": [[], []], "source_vocab": words, "target_vocab": words}


def sentences(seed: int) -> torch.Tensor:
    """<bos> … <eos>, as the task numbers them."""
    words = some(3, 6, seed=seed, lowest=4)
    words[:, 0] = 2
    for row, length in enumerate((5, 3, 6)):
        words[row, length - 1] = 3
        words[row, length:] = 1
    return words


# ---- an attention of the user's own --------------------------------------------------------------

LANGUAGES = ("characters", "human_numbers", "translation")


@pytest.mark.parametrize("config", LANGUAGES)
@pytest.mark.parametrize("cls", [Mean, NextOne, Late])
def test_an_attention_that_looks_ahead_is_refused_before_it_trains(mistake, experiment, config, cls):
    line = mistake(experiment, config, *SMALL[config], "--attn", f"{__name__}.{cls.__name__}")
    assert f"--attn {__name__}.{cls.__name__}" in line
    assert "causal" in line


def test_an_attention_that_looks_at_padding_is_refused(mistake, experiment):
    line = mistake(experiment, "translation", *SMALL["translation"], "--attn", f"{__name__}.NoMask")
    assert f"--attn {__name__}.NoMask" in line
    assert "mask" in line


@pytest.mark.parametrize("cls", [Scratch, NoMask])
def test_an_attention_that_obeys_what_it_is_told_is_not(experiment, cls):
    """Nothing is masked in a text."""
    result = experiment("characters", *SMALL["characters"], "--attn", f"{__name__}.{cls.__name__}")
    assert result["val/loss"] < 10


def test_an_attention_that_has_learned_to_look_ahead_is_not_judged(in_tmp_dir, experiment, capsys):
    """The first step opens its gate; the validation after that is refused."""
    with pytest.raises(SystemExit):
        experiment("characters", *SMALL["characters"], "--attn", f"{__name__}.Gated", "--lr", "0.1")
    assert "causal" in capsys.readouterr().err.splitlines()[-1]
    assert list(in_tmp_dir.rglob("config.yaml"))  # it had begun to train
    assert not list(in_tmp_dir.rglob("result.json"))
    assert not list(in_tmp_dir.rglob("*.ckpt"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attn", ATTENTION)
def test_none_of_ours_is_taken_for_one_that_looks(attn, dtype):
    """In any precision, and however long the text: rounding is no look."""
    for length in (1, 2, 3, 5, 100):
        spec = {"vocab": list("abcde"), "length": length}
        sizes = {"attn": attn, "dim": 32, "depth": 3, "heads": 4}
        tasks = [CharacterTask(spec, **sizes), NumberTask(spec, **sizes)]
        tasks += [TranslationTask({**translation("abc"), "max_len": length}, **sizes)] if length > 2 else []
        for task in tasks:
            task.to(dtype).check_causality()


@pytest.mark.parametrize("symbols", [1, 2, 3])
def test_the_smallest_of_alphabets(symbols):
    """Of one symbol nothing is hidden; of two, what looks ahead is found."""
    spec = {"vocab": list("abc"[:symbols]), "length": 4}
    CharacterTask(spec, dim=8, depth=1, heads=2).check_causality()
    peeking = CharacterTask(spec, f"{__name__}.Mean", dim=8, depth=1, heads=2)
    if symbols == 1:
        peeking.check_causality()
    else:
        with pytest.raises(UserError, match="causal"):
            peeking.check_causality()


def test_being_looked_at_changes_nothing():
    model = training_language_model("kv")
    model.encoder[0].eval()  # frozen by the user
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
        assert not model(some(1, 3)).requires_grad
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert model(some(1, 3)).requires_grad
