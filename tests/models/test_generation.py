"""Decoding in batches and with a memory is decoding sentence by sentence and without one."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvt.attention import AttentionFactory
from kvt.models import Seq2Seq
from kvt.models.generation import beam_search, decode_sorted, greedy, sample
from kvt.system.errors import UserError
from tests.helpers.small_models import BOS, EOS, KINDS, MAX_LEN, PAD, SYMBOLS, language_model, padded, some, translator

LENGTHS = [5, 1, 7, 3, 3, 8]  # of the sources of a batch
ENDS = [0.0, 2.0, 4.0]  # how gladly sentences end


def rng():
    return torch.Generator().manual_seed(3)


# ---- samples -------------------------------------------------------------------------------------


@torch.no_grad()
def sampled(*words, **settings) -> torch.Tensor:
    """All of what is sampled, (B, tokens)."""
    return torch.cat([*sample(*words, **settings)], dim=1)


def plain_sample(model, prompt, tokens, temperature, top_k, generator):
    """Everything is computed anew for each token."""
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


@pytest.mark.parametrize("length", [1, 5, MAX_LEN, MAX_LEN + 3])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (0.8, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_plain_loop_within_the_window_and_beyond(kind, temperature, top_k, length):
    model, prompt, tokens = language_model(kind, learned=True), some(4, length), MAX_LEN + 2
    ours = sampled(model, prompt, tokens, temperature=temperature, top_k=top_k, generator=rng())
    assert ours.tolist() == plain_sample(model, prompt, tokens, temperature, top_k, rng()).tolist()


@torch.no_grad()
def plain_restarts(model, prompt, tokens):
    """Without a cache: a token sees all since the last start, and a window that would overflow starts at its middle."""
    text, start = prompt, 0
    for _ in range(tokens):
        if text.shape[1] - start > MAX_LEN:
            start = text.shape[1] - MAX_LEN // 2
        text = torch.cat([text, model(text[:, start:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text[:, prompt.shape[1] :]


@pytest.mark.parametrize("length", [1, MAX_LEN, MAX_LEN + 3])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_window_restarts_from_its_last_half(kind, learned, length):
    model, prompt, tokens = language_model(kind, learned=learned), some(4, length), 3 * MAX_LEN
    ours = sampled(model, prompt, tokens, temperature=0, window="restart")
    assert torch.equal(ours, plain_restarts(model, prompt, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_as_long_as_the_text_fits_the_window_restarting_is_exact(kind):
    model, prompt = language_model(kind, learned=True), some(4, 2)
    exact, restart = (
        sampled(model, prompt, 3 * MAX_LEN, generator=rng(), window=window) for window in ("exact", "restart")
    )
    inside = MAX_LEN - 2 + 1  # the last of them is drawn by a full window
    assert torch.equal(restart[:, :inside], exact[:, :inside])
    assert kind == "identity" or not torch.equal(restart, exact)


def test_these_samples_are_of_many_symbols_and_differ():
    for kind in sorted(KINDS.keys() - {"identity"}):
        text = sampled(language_model(kind, learned=True), some(6, 5), 10, temperature=0)
        assert len(text.unique(dim=0)) > 1
        assert len(text.unique()) > 2


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, None), (1.0, 4), (2.0, 1), (2.0, 10 * SYMBOLS)])
def test_symbols_are_drawn_as_often_as_they_should(temperature, top_k):
    model, prompt, draws = language_model("kv"), some(1, 3), 20_000
    drawn = sampled(model, prompt.expand(draws, -1), 1, temperature=temperature, top_k=top_k, generator=rng())
    logits = model(prompt)[0, -1]
    likeliest = logits >= logits.sort(descending=True).values[min(top_k or SYMBOLS, SYMBOLS) - 1]
    expected = torch.where(likeliest, (logits / temperature).exp(), 0.0)
    share = drawn.flatten().bincount(minlength=SYMBOLS) / draws
    assert_close(share.double(), expected / expected.sum(), atol=4 * (0.25 / draws) ** 0.5, rtol=0)
    assert (share[~likeliest] == 0).all()


def test_next_to_no_temperature_takes_the_likeliest():
    model, prompt = language_model("kv"), some(4, 3)
    for temperature in (1e-300, 1e-40, 1e-3):
        cold = sampled(model, prompt, 10, temperature=temperature)
        assert torch.equal(cold, sampled(model, prompt, 10, temperature=0))


@pytest.mark.parametrize(
    ("length", "setting", "says"),
    [
        (0, {}, "the prompt is empty"),
        (2, {"tokens": 0}, "tokens=0"),
        (2, {"top_k": 0}, "top_k=0"),
        (2, {"temperature": -0.1}, "temperature=-0.1"),
        (2, {"temperature": float("nan")}, "temperature=nan"),
        (2, {"temperature": float("inf")}, "temperature=inf"),
        (2, {"window": "half"}, "window.*half.*exact, restart"),
    ],
)
def test_impossible_samples_are_named(length, setting, says):
    with pytest.raises(UserError, match=says):
        sample(language_model("kv"), some(1, length), **{"tokens": 3, **setting})


# ---- translations --------------------------------------------------------------------------------


@torch.no_grad()
def log_probabilities(model, source, target):
    """Of what follows the target, by the whole model, of one sentence that is not padded."""
    logits = model(torch.tensor([source]), torch.tensor([target]))[0, -1]
    return logits.log_softmax(-1).tolist()


def plain_greedy(model, source):
    target = [BOS]
    while len(target) <= model.max_len:
        following = log_probabilities(model, source, target)
        best = following.index(max(following))
        if best == EOS:
            break
        target.append(best)
    return target[1:]


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


def best_of_all(model, source, symbols):
    """Of all sentences that there are: the one of the greatest mean log-probability."""
    scored = []
    for length in range(1, model.max_len + 1):
        for tokens in product(range(symbols), repeat=length):
            if EOS in tokens[:-1] or (length < model.max_len and tokens[-1] != EOS):
                continue
            steps = [log_probabilities(model, source, [BOS, *tokens[:i]])[tokens[i]] for i in range(length)]
            scored.append((sum(steps) / length, [token for token in tokens if token != EOS]))
    return max(scored)[1]


def sentences(batch):
    return [row[row != PAD].tolist() for row in batch]


def lengths(translations):
    return {len(translation) for translation in translations}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_plain_loop_of_one_sentence_after_the_other(kind, ends):
    model, source = translator(kind, ends=ends), padded(LENGTHS)
    translations = greedy(model, source, bos=BOS, eos=EOS)
    assert translations == [plain_greedy(model, sentence) for sentence in sentences(source)]
    assert max(lengths(translations)) <= MAX_LEN


@pytest.mark.parametrize("ends", ENDS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy(kind, ends):
    model, source = translator(kind, ends=ends, seed=1), padded(LENGTHS)
    assert beam_search(model, source, bos=BOS, eos=EOS, beam=1) == greedy(model, source, bos=BOS, eos=EOS)


@pytest.mark.parametrize("beam", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_beam_search_is_the_plain_one_of_one_sentence_after_the_other(kind, beam):
    ends = ENDS[beam % len(ENDS)]
    model, source = translator(kind, ends=ends, seed=beam, symbols=6, max_len=5), padded([3, 1, 5], seed=beam)
    translations = beam_search(model, source, bos=BOS, eos=EOS, beam=beam)
    assert translations == [plain_beam_search(model, sentence, beam) for sentence in sentences(source)]


def test_these_translations_end_early_and_late_and_never_and_a_beam_matters():
    source, found = padded(LENGTHS), []
    for seed, ends in product(range(3), ENDS):
        model = translator("kv+pos", ends=ends, seed=seed)
        found.append([beam_search(model, source, bos=BOS, eos=EOS, beam=beam) for beam in (1, 3)])
    assert set().union(*(lengths(one) for one, _ in found)) >= {0, 1, 3, MAX_LEN}
    assert any(len(lengths(one)) > 2 for one, _ in found)
    assert sum(one != three for one, three in found) > 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("beam", [8, 30])
def test_a_beam_wide_enough_finds_the_best_of_all_sentences(beam, seed):
    """There are 7 sentences of up to 3 tokens that end, and 8 that do not."""
    model, source = translator("kv", seed=seed, ends=seed / 2, symbols=3, max_len=3), padded([3, 2], seed=seed)
    found = beam_search(model, source, bos=BOS, eos=EOS, beam=beam)
    assert found == [best_of_all(model, sentence, 3) for sentence in sentences(source)]


class Scripted(torch.nn.Module):
    """A translator whose next symbol depends on the last alone: so likely are those that are named after it."""

    max_len = MAX_LEN

    def __init__(self, script):
        super().__init__()
        self.script = script

    def encode(self, source):
        return self

    def select(self, rows):
        """Nothing is remembered."""

    def next_logits(self, tokens, state):
        likely = [self.script.get(token, {}) for token in tokens[:, 0].tolist()]
        return torch.tensor([[row.get(symbol, 1e-3) for symbol in range(10)] for row in likely]).log()


@pytest.mark.parametrize("beam", [1, 2, 3, 4, 8])
def test_many_that_end_too_early_do_not_stop_a_good_one(beam):
    sure = Scripted({BOS: {3: 1, EOS: 0.01}, 3: {4: 1, EOS: 0.01}, 4: {5: 1, EOS: 0.01}, 5: {EOS: 1}})
    assert beam_search(sure, padded([2, 1]), bos=BOS, eos=EOS, beam=beam) == [[3, 4, 5]] * 2


def test_several_that_end_at_once_leave_room_for_as_many_that_go_on():
    ends = {3: {EOS: 0.5, 6: 0.49}, 4: {EOS: 0.5, 7: 0.45}}
    others = dict.fromkeys([3, 4, 5, 6, 7, 9], 0.1)
    late = Scripted({BOS: {3: 0.34, 4: 0.33, 5: 0.32}, **ends, 5: {8: 0.4, **others}, 8: {EOS: 1}})
    assert beam_search(late, padded([2]), bos=BOS, eos=EOS, beam=3) == [[5, 8]]


@pytest.mark.parametrize("beam", [0, -1])
def test_a_beam_has_a_width(beam):
    with pytest.raises(UserError, match=f"beam={beam}"):
        beam_search(translator("kv"), padded([2]), bos=BOS, eos=EOS, beam=beam)


# ---- many sentences ------------------------------------------------------------------------------

SOURCES = st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=6), max_size=20)


@settings(max_examples=50, deadline=None)
@given(sources=SOURCES, size=st.integers(1, 7))
def test_translations_come_in_the_order_of_their_sources(sources, size):
    batches = []

    def backwards(batch):
        batches.append(sentences(batch))
        return [sentence[::-1] for sentence in batches[-1]]

    assert decode_sorted(backwards, sources, PAD, size) == [source[::-1] for source in sources]
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    in_turn = [len(sentence) for batch in batches for sentence in batch]
    assert in_turn == sorted(map(len, sources))


def test_sorted_into_batches_each_sentence_is_translated_as_if_alone():
    model = translator("kv+pos", ends=1.5)
    sources = sentences(padded([3, 8, 1, 3, 5, 2, 3]))
    sources += sources[:2]
    translations = decode_sorted(lambda batch: greedy(model, batch, bos=BOS, eos=EOS), sources, PAD, 4)
    assert translations == [plain_greedy(model, source) for source in sources]


def test_an_attention_that_ignores_its_cache_does_not_translate_nonsense():
    make = AttentionFactory("tests.helpers.small_models.Forgetful", heads=2)
    model = Seq2Seq(make, source_vocab_size=9, target_vocab_size=9, pad=1, max_len=8, dim=8, depth=1).eval()
    with pytest.raises(UserError, match="cache"):
        greedy(model, torch.tensor([[2, 5, 3]]), bos=2, eos=3)
