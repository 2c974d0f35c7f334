"""Language models and translators: their formulas; caches, padding and later tokens change nothing."""

from itertools import cycle
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from kvt.attention.positions import sinusoid
from kvt.models import CausalLM, Seq2Seq
from kvt.models.embedding import POSITIONS, LearnedPositions, SinusoidalPositions, make_embedding
from tests.helpers.small_models import (
    DIM,
    KINDS,
    MAX_LEN,
    PAD,
    SYMBOLS,
    factory,
    language_model,
    opinionated,
    padded,
    some,
    translator,
)

EMBEDDINGS = [LearnedPositions, SinusoidalPositions]
LENGTHS = [5, 1, 7, 3]  # of the sources of a batch


def close(ours, plain):
    assert_close(ours, plain, atol=1e-10, rtol=0)


# ---- embeddings ----------------------------------------------------------------------------------


def test_embeddings_are_their_formulas():
    tokens, learned = some(3, 5), LearnedPositions(SYMBOLS, DIM, MAX_LEN)
    close(learned(tokens), learned.tokens.weight[tokens] + learned.positions.weight[:5])
    fixed = SinusoidalPositions(SYMBOLS, DIM, MAX_LEN)
    close(fixed(tokens), sqrt(DIM) * fixed.tokens.weight[tokens] + sinusoid(5, DIM))
    none = make_embedding("none", SYMBOLS, DIM, MAX_LEN)
    close(none(tokens, start=MAX_LEN), none.tokens.weight[tokens])


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_scaled_embedding_begins_as_large_and_is_dropped_in_training(positions):
    torch.manual_seed(0)
    plain, scaled = (
        make_embedding(positions, 1000, 64, MAX_LEN, dropout=dropout, scaled=scaled)
        for dropout, scaled in ((0.0, False), (0.25, True))
    )
    assert 0.98 < plain.tokens.weight.std() < 1.02
    assert 0.98 < 8 * scaled.tokens.weight.std() < 1.02
    tokens = torch.arange(1000).view(-1, MAX_LEN)
    assert_close(scaled.eval()(tokens).std(), plain(tokens).std(), atol=0.05, rtol=0)
    assert_close((scaled.train()(tokens) == 0).float().mean(), torch.tensor(0.25), atol=0.02, rtol=0)


# ---- language models -----------------------------------------------------------------------------


@pytest.mark.parametrize("final_norm", [True, False])
def test_a_language_model_is_its_formula(final_norm):
    embedding, tokens = LearnedPositions(SYMBOLS, DIM, MAX_LEN), some(3, 6)
    model = opinionated(CausalLM(factory("kv"), embedding, depth=2, final_norm=final_norm), seed=0)
    x = model.embedding(tokens)
    for block in model.encoder:
        x = x + block.attention.layer(block.attention.norm(x), causal=True)
        network = block.feed_forward.layer
        x = x + network[3](F.relu(network[0](block.feed_forward.norm(x))))
    assert model.encoder[0].feed_forward.layer[0].out_features == 4 * DIM
    if final_norm:
        x = model.norm(x)
    close(model(tokens), F.linear(x, model.head.weight, model.head.bias))


CHUNKS = [("sinusoidal", [1] * MAX_LEN), ("learned", [3, 1, 4]), ("none", [1, 5, 1, 1])]


@pytest.mark.parametrize(("kind", "case"), zip(KINDS, cycle(CHUNKS), strict=False), ids=str)
def test_logits_in_chunks_equal_those_of_the_whole(kind, case):
    (positions, chunks), tokens = case, some(3, MAX_LEN)
    model = language_model(kind, positions)
    whole, caches, read = model(tokens), model.make_caches(), 0
    for chunk in tokens.split(chunks, dim=1):
        logits = model.next_logits(chunk, caches)
        read += chunk.shape[1]
        close(logits, whole[:, read - 1])
        close(model.next_logits(tokens[:, :read]), whole[:, read - 1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", EMBEDDINGS)
def test_a_tied_head_shares_the_embeddings_table(positions, tied):
    model = CausalLM(factory("kv"), positions(SYMBOLS, DIM, MAX_LEN), depth=1, tied=tied)
    body = sum(p.numel() for part in (model.embedding, model.encoder, model.norm) for p in part.parameters())
    head = SYMBOLS + (not tied) * SYMBOLS * DIM
    assert sum(p.numel() for p in model.parameters()) == body + head
    before = model(some(1, 3))
    with torch.no_grad():
        model.embedding.tokens.weight[0] += 1  # of a symbol that does not occur
    assert (not torch.equal(model(some(1, 3)), before)) == tied


# ---- translators ---------------------------------------------------------------------------------


def test_a_translator_is_its_formula():
    model, source, target = translator("kv"), some(2, 5), some(2, 4, seed=1)

    def fed(x, block):
        network = block.feed_forward.layer
        return x + network[3](F.relu(network[0](block.feed_forward.norm(x))))

    memory = model.source_embedding(source)
    for block in model.encoder:
        memory = fed(memory + block.attention.layer(block.attention.norm(memory)), block)
    memory = model.encoder_norm(memory)
    x = model.target_embedding(target)
    for block in model.decoder:
        x = x + block.attention.layer(block.attention.norm(x), causal=True)
        cross = block.cross_attention
        x = fed(x + cross.layer(cross.norm(x), memory), block)
    close(model(source, target), model.generator(model.decoder_norm(x)))


def test_all_weights_of_a_translator_are_xavier_uniform():
    sizes = {"source_vocab_size": 50, "target_vocab_size": 70, "pad": PAD, "max_len": MAX_LEN, "dim": 16, "depth": 2}
    model = Seq2Seq(factory("kv+pos"), **sizes)
    matrices = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    for weight in matrices:
        bound = sqrt(6 / sum(weight.shape))
        assert weight.abs().max() <= bound
        if weight.numel() > 100:
            assert weight.abs().max() > 0.9 * bound


ROWS = [[2, 0, 0, 3], [True, False, True, True], [False] * 4]


@pytest.mark.parametrize(("kind", "rows"), zip(KINDS, cycle(ROWS), strict=False), ids=str)
def test_selected_rows_continue_as_if_alone(kind, rows):
    model, source, target = translator(kind), padded(LENGTHS), some(len(LENGTHS), MAX_LEN, seed=1)
    whole, state, rows = model(source, target), model.encode(source), torch.tensor(rows)
    for place in range(MAX_LEN):
        if place in (0, 3):  # before there is any token, and after some
            state.select(rows)
            whole, target = whole[rows], target[rows]
            rows = torch.arange(len(target)).flip(0)
        close(model.next_logits(target[:, place : place + 1], state), whole[:, place])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_other_sentences_change_nothing(kind):
    model, target = translator(kind), some(len(LENGTHS), 5, seed=1)
    source = padded(LENGTHS)
    together = model(source, target)
    close(model(F.pad(source, (0, 1), value=PAD), target), together)
    for row, length in enumerate(LENGTHS):
        alone = source[row : row + 1, :length]
        close(model(alone, target[row : row + 1])[0], together[row])
