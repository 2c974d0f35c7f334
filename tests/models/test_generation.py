"""Decoding in batches with caches equals plain decoding, sentence by sentence without caches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.attention import QKV, AttentionFactory, KVCache
from kvt.models import CausalLM, Seq2Seq
from kvt.models.embedding import make_embedding
from kvt.models.generation import beam_search, decode_sorted, greedy, sample
from kvt.system import UserError
from tests.helpers.small_models import BOS, EOS, MAX_LEN, PAD, SYMBOLS, language_model, padded, some, translator

LENGTHS = [5, 1, 7, 3, 3, 8]  # of the sources of a batch
FEW = ["qkv, grouped", "kv", "kv+pos, learned"]  # attentions; tests/models/test_language_models.py tries all
ENDS = [0.0, 2.0, 4.0]  # added to the logit of <eos>


def rng():
    return torch.Generator().manual_seed(3)


@torch.no_grad()
def sampled(*words, **settings) -> torch.Tensor:
    """All sampled tokens, (B, tokens)."""
    return torch.cat([*sample(*words, **settings)], dim=1)


@torch.no_grad()
def plain_sample(model, prompt, tokens, temperature, top_k, generator):
    """Without caches."""
    text = prompt
    for _ in range(tokens):
        logits = model(text[:, -MAX_LEN:])[:, -1]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            likeliest, symbols = logits.sort(descending=True)
            drawn = torch.multinomial((likeliest[:, :top_k] / temperature).softmax(-1).float(), 1, generator=generator)
            new = symbols.gather(1, drawn)
        text = torch.cat([text, new], dim=1)
    return text[:, prompt.shape[1] :]


class Placed(QKV):
    """Adds a vector of its own for each position to query and key."""

    def __init__(self, dim, heads, *, max_len, **kwargs):
        super().__init__(dim, heads, **kwargs)
        self.table = torch.nn.Parameter(torch.randn(max_len, self.head_dim))

    def rotate(self, q, k, v, start):
        own = self.table[start : start + k.shape[2]]
        return q + own, k + own, v


class OwnCache(KVCache):
    pass


class WithOwnCache(QKV):
    def make_cache(self, max_len, slides=False):
        return OwnCache(max_len, slides)


def test_a_translator_decodes_with_the_caches_that_its_attention_makes():
    sizes = {"source_vocab_size": SYMBOLS, "target_vocab_size": SYMBOLS, "pad": PAD, "dim": 8, "depth": 2}
    model = Seq2Seq(AttentionFactory(f"{__name__}.WithOwnCache", {}, heads=2), max_len=MAX_LEN, **sizes).eval()
    state = model.encode(some(2, 3))
    model.next_logits(some(2, 1), state)
    assert [type(own) for own, _ in state.caches] == [OwnCache, OwnCache]


@pytest.mark.parametrize(("length", "temperature", "top_k"), [(1, 0.8, 5), (MAX_LEN, 0.0, None), (MAX_LEN + 3, 0.8, 5)])
@pytest.mark.parametrize("kind", FEW)
def test_samples_equal_the_plain_loops_within_the_window_and_beyond(kind, length, temperature, top_k):
    model, prompt = language_model(kind, "learned" if length <= MAX_LEN else "sinusoidal"), some(4, length)
    setting = {"temperature": temperature, "top_k": top_k}
    ours = sampled(model, prompt, 2 * MAX_LEN, generator=rng(), **setting)
    assert ours.tolist() == plain_sample(model, prompt, 2 * MAX_LEN, generator=rng(), **setting).tolist()


@torch.no_grad()
def band_sample(model, prompt, tokens):
    """The likeliest symbols by full attention over the whole text, in which a token sees the last MAX_LEN of them."""
    text = prompt
    for _ in range(tokens):
        n = text.shape[1]
        band = ~torch.ones(n, n, dtype=torch.bool).tril(-MAX_LEN)[None, None]
        states = model.encoder(model.embedding(text), mask=band, causal=True)
        text = torch.cat([text, model.head(model.norm(states))[:, -1:].argmax(-1)], dim=1)
    return text[:, prompt.shape[1] :]


KINDS = ["kv", "kv, rope", "qkv, rope", "kv, no self", "kv+phase", "q-kv-gemma", "q-kv-deepseek", "mla, rope"]


@pytest.mark.parametrize("length", [1, MAX_LEN, 2 * MAX_LEN + 3])
@pytest.mark.parametrize(("kind", "share"), [*((kind, 1) for kind in KINDS), ("qkv, rope", 2)])
def test_without_a_table_of_positions_a_text_goes_on_under_a_band_mask(kind, share, length):
    model, prompt, tokens = language_model(kind, "none", depth=3, share=share), some(4, length), 3 * MAX_LEN
    assert model.is_endless
    assert sampled(model, prompt, tokens, temperature=0).tolist() == band_sample(model, prompt, tokens).tolist()


def test_early_tokens_reach_further_than_the_window_through_several_layers():
    model, prompt = language_model("kv, rope", "none", depth=3), some(1, 2 * MAX_LEN)
    other = prompt.clone()
    other[:, 0] = (other[:, 0] + 1) % SYMBOLS
    logits = []
    for text in (prompt, other):
        caches = model.make_caches()
        logits.append([model.next_logits(token, caches) for token in text.split(1, dim=1)][-1])
    assert (logits[0] - logits[1]).abs().max() > 1e-6


def goes_on_within_its_window(model, length):
    found = sampled(model, some(4, length), 2 * MAX_LEN, temperature=0)
    assert found.tolist() == plain_sample(model, some(4, length), 2 * MAX_LEN, 0, None, None).tolist()


@pytest.mark.parametrize(("kind", "positions"), [("kv+pos", "none"), ("kv+pos, rope", "none"), ("kv, rope", "learned")])
def test_with_a_table_anywhere_the_window_slides_as_ever(kind, positions):
    model = language_model(kind, positions)
    assert not model.is_endless
    goes_on_within_its_window(model, MAX_LEN)


@pytest.mark.parametrize("attn", [f"{__name__}.Placed", "tests.helpers.small_models.Forgetful"])
def test_an_own_rotation_begins_anew_when_the_window_slides_and_who_ignores_the_cache_sees_the_window(attn):
    torch.manual_seed(0)
    factory = AttentionFactory(attn, {}, heads=2, max_len=MAX_LEN)
    model = CausalLM(factory, make_embedding("none", SYMBOLS, 8, MAX_LEN), depth=2).double().eval()
    goes_on_within_its_window(model, 3)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        *((1.0, None, 0.6), (2.0, 4, 0.7), (1.0, None, 1e-9)),
        *((0.5, None, 1.0), (1.0, 4, 1.0), (2.0, 1, 1.0), (2.0, 10 * SYMBOLS, 1.0)),
    ],
)
def test_symbols_are_drawn_with_their_probability_among_the_fewest_likeliest_that_have_top_p(temperature, top_k, top_p):
    model, prompt, draws = language_model("kv"), some(1, 3), 20_000
    setting = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    share = sampled(model, prompt.expand(draws, -1), 1, generator=rng(), **setting).flatten()
    share = share.bincount(minlength=SYMBOLS) / draws
    of_all = (model(prompt)[0, -1] / temperature).softmax(-1)
    of_these = {symbol: of_all[symbol] for symbol in of_all.argsort(descending=True)[:top_k].tolist()}
    nucleus, total = [], 0.0
    for symbol, probability in of_these.items():
        if total < top_p * sum(of_these.values()):
            nucleus.append(symbol)
            total += probability
    assert set(share.nonzero().flatten().tolist()) <= set(nucleus)
    for symbol in nucleus:
        assert abs(share[symbol] - of_all[symbol] / total) < 4 * (0.25 / draws) ** 0.5


def test_a_tiny_temperature_takes_the_likeliest():
    model, prompt = language_model("kv"), some(4, 3)
    for temperature in (1e-300, 1e-40, 1e-3):
        cold = sampled(model, prompt, 10, temperature=temperature)
        assert torch.equal(cold, sampled(model, prompt, 10, temperature=0))


@pytest.mark.parametrize(
    ("length", "setting", "message"),
    [
        (0, {}, "the prompt is empty"),
        (2, {"top_k": 0}, "top_k=0"),
        (2, {"top_p": 1.5}, "top_p=1.5"),
        (2, {"temperature": -0.1}, "temperature=-0.1"),
    ],
)
def test_impossible_samples_are_named(length, setting, message):
    with pytest.raises(UserError, match=message):
        sample(language_model("kv"), some(1, length), **{"tokens": 3, **setting})


# ---- translations --------------------------------------------------------------------------------


@torch.no_grad()
def log_probabilities(model, source, target):
    """Of the next token, by the whole model, for one sentence without padding."""
    logits = model(torch.tensor([source]), torch.tensor([target]))[0, -1]
    return logits.log_softmax(-1).tolist()


def plain_beam_search(model, source, beam):
    beams, ended = [(0.0, [BOS])], []
    for length in range(1, model.max_len + 1):
        candidates = sorted(
            (
                (total + log_p, [*target, symbol])
                for total, target in beams
                for symbol, log_p in enumerate(log_probabilities(model, source, target))
            ),
            reverse=True,
        )[: 2 * beam]
        ended += [(total / length, target[1:-1]) for total, target in candidates[:beam] if target[-1] == EOS]
        beams = [(total, target) for total, target in candidates if target[-1] != EOS][:beam]
        if len(ended) >= beam and max(ended)[0] >= beams[0][0] / length:
            return max(ended)[1]
    return max(ended + [(total / model.max_len, target[1:]) for total, target in beams])[1]


def sentences(batch):
    return [row[row != PAD].tolist() for row in batch]


@pytest.mark.parametrize(("kind", "ends"), zip(FEW, ENDS, strict=True))
def test_greedy_equals_one_beam_and_the_plain_search(kind, ends):
    model, source = translator(kind, ends=ends), padded(LENGTHS)
    translations = greedy(model, source, bos=BOS, eos=EOS)
    assert translations == beam_search(model, source, bos=BOS, eos=EOS, beam=1)
    assert translations == [plain_beam_search(model, sentence, 1) for sentence in sentences(source)]


@pytest.mark.parametrize(
    ("kind", "beam"), [*((kind, 3) for kind in FEW), ("kv+pos", 2), ("kv+pos", 5), ("q-kv", 5), ("kv", 8)]
)
def test_beam_search_equals_the_plain_one(kind, beam):
    ends = ENDS[beam % len(ENDS)]
    model, source = translator(kind, ends=ends, seed=beam, symbols=6, max_len=5), padded([3, 1, 5], seed=beam)
    translations = beam_search(model, source, bos=BOS, eos=EOS, beam=beam)
    assert translations == [plain_beam_search(model, sentence, beam) for sentence in sentences(source)]


# ---- many sentences ------------------------------------------------------------------------------

SOURCES = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=6), max_size=20)


@settings(max_examples=30)
@given(sources=SOURCES, size=st.integers(1, 7))
def test_translations_come_in_the_order_of_their_sources(sources, size):
    batches = []

    def backwards(batch):
        batches.append(sentences(batch))
        return [sentence[::-1] for sentence in batches[-1]]

    assert decode_sorted(backwards, sources, PAD, batch_size=size) == [source[::-1] for source in sources]
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    in_turn = [len(sentence) for batch in batches for sentence in batch]
    assert in_turn == sorted(map(len, sources))


def test_an_attention_that_ignores_its_cache_is_refused():
    make = AttentionFactory("tests.helpers.small_models.Forgetful", heads=2)
    model = Seq2Seq(make, source_vocab_size=9, target_vocab_size=9, pad=1, max_len=8, dim=8, depth=1).eval()
    with pytest.raises(UserError, match="cache"):
        greedy(model, torch.tensor([[2, 5, 3]]), bos=2, eos=3)
