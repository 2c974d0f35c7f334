"""Sentences in batches: all of them, in an order that is theirs alone, with little padding."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from kvt.data.loader import SentenceBatches

PAD = 1
LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60)
SIZES = st.integers(1, 20)


def corpus(lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sentences a row, each full of numbers that tell row, side and length."""

    def side(which):
        rows = [
            torch.full((pair[which],), 1000 * (row + 1) + 100 * which + pair[which]) for row, pair in enumerate(lengths)
        ]
        return pad_sequence(rows, batch_first=True, padding_value=PAD)

    return side(0), side(1)


def make(lengths, **kwargs) -> SentenceBatches:
    return SentenceBatches(*corpus(lengths), pad=PAD, **{"batch_size": 4, "shuffle": True, **kwargs})


def served(batches) -> list[tuple[list[int], float]]:
    """The rows of each batch, and what dropout would draw for it."""
    return [(rows.tolist(), torch.rand(()).item()) for *_, rows in batches]


def random_lengths(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = (2.45 + 0.35 * torch.randn(count, generator=generator)).exp().round().clamp(3, 38).int() + 2
    target = (source + (1.8 * torch.randn(count, generator=generator)).round().int()).clamp(5, 42)
    return list(zip(source.tolist(), target.tolist(), strict=True))


@given(lengths=LENGTHS, size=SIZES, epoch=st.integers(0, 5))
def test_an_epoch_serves_every_row_once(lengths, size, epoch):
    batches = make(lengths, batch_size=size)
    batches.set_epoch(epoch)
    visited = [batch for *_, batch in batches]
    sizes = [len(batch) for batch in visited]
    assert torch.cat(visited).sort().values.tolist() == list(range(len(lengths)))
    assert len(batches) == len(sizes) == -(-len(lengths) // size)
    assert sorted(sizes)[1:] == [size] * (len(sizes) - 1)


@given(lengths=LENGTHS, size=SIZES, shuffle=st.booleans())
def test_a_batch_holds_its_rows_trimmed_to_the_longest_on_each_side(lengths, size, shuffle):
    sides = corpus(lengths)
    for *batch, numbers in make(lengths, batch_size=size, shuffle=shuffle):
        for which, (part, whole) in enumerate(zip(batch, sides, strict=True)):
            longest = max(lengths[row][which] for row in numbers.tolist())
            assert part.shape == (len(numbers), longest)
            assert torch.equal(part, whole[numbers, :longest])


def test_the_order_depends_on_seed_and_epoch_alone():
    lengths = random_lengths(300)

    def epoch(number, seed):
        torch.rand(number)  # whatever ran before
        batches = make(lengths, seed=seed)
        batches.set_epoch(number)
        return served(batches)

    assert epoch(0, 1) == epoch(0, 1)
    assert epoch(3, 1) == epoch(3, 1)
    orders = [epoch(0, 1), epoch(1, 1), epoch(0, 2)]
    assert len({frozenset(batch) for order in orders for batch, _ in order}) > 150  # other sentences come together


def test_sentences_of_similar_length_come_together():
    lengths = random_lengths(6000)
    sides = corpus(lengths)

    def padding(batches):
        parts = [part for *batch, _ in batches for part in batch[:2]]
        return sum(int((part == PAD).sum()) for part in parts) / sum(part.numel() for part in parts)

    assert padding(SentenceBatches(*sides, pad=PAD, batch_size=50, shuffle=True)) < 0.1
    assert padding(SentenceBatches(*sides, pad=PAD, batch_size=50)) > 0.3
