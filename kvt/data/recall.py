"""Synthetic recall tasks as tensors: associative recall, induction heads, copying, compression, memorisation.

Symbols are 0 … V − 1. Each function returns rows as `Questions`.
"""

from itertools import permutations
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from kvt.data.vocabulary import IGNORE


class Questions(NamedTuple):
    """A batch of sequences and the answers that are asked for in them, int64 (rows, N) each."""

    symbols: Tensor
    answers: Tensor  # at each place the symbol that is asked for there, else `IGNORE`
    distance: Tensor  # how many places back the answer stands; 0 where nothing is asked, or it does not stand there


def blank(rows: int, length: int) -> Questions:
    """Return sequences of zeros without a question."""
    zeros = torch.zeros(rows, length, dtype=torch.long)
    return Questions(zeros, torch.full_like(zeros, IGNORE), zeros.clone())


def distinct(rows: int, count: int, low: int, high: int, generator: Generator) -> Tensor:
    """Draw `count` different numbers of low … high − 1 in random order: int64 (rows, count).

    Floyd's algorithm: the i-th draw is among the first high − low − count + i + 1 numbers; one that is taken already is
    replaced by the last of these, which cannot be.
    """
    chosen = torch.empty(rows, count, dtype=torch.long)
    for i in range(count):
        last = high - low - count + i
        drawn = torch.randint(last + 1, (rows, 1), generator=generator)
        taken = (chosen[:, :i] == drawn).any(1, keepdim=True)
        chosen[:, i : i + 1] = drawn.masked_fill(taken, last)
    order = torch.rand(rows, count, generator=generator).argsort(1)
    return low + chosen.gather(1, order)


def slot_weights(slots: int, power: float = 0.01) -> Tensor:
    """Return the probabilities of the slots 0 … slots − 1, in proportion to (slot + 1)^(power − 1): float64 (slots)."""
    weights = torch.arange(1, slots + 1, dtype=torch.double) ** (power - 1)
    return weights / weights.sum()


def mqar(rows: int, vocab: int, length: int, pairs: int, random_filler: bool, generator: Generator) -> Questions:
    """Generate multi-query associative recall (Arora et al. 2023, "Zoology", §4): pairs, then each key once more.

    The keys are different numbers of 1 … V/2 − 1, the values of V/2 … V − 1; where a key stands again, at 2K + 2 · slot
    for K pairs, its value is asked. The slots are different ones, drawn with `slot_weights`. All other places have 0,
    or random symbols.

    >>> found = mqar(1, 12, 16, 2, False, Generator().manual_seed(0))
    >>> found.symbols.tolist()
    [[1, 9, 5, 11, 5, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    >>> [(place, found.answers[0, place].item()) for place in (4, 8)]
    [(4, 11), (8, 9)]
    """
    keys = distinct(rows, pairs, 1, vocab // 2, generator)
    values = distinct(rows, pairs, vocab // 2, vocab, generator)
    weights = slot_weights(length // 2 - pairs).expand(rows, -1)
    places = 2 * pairs + 2 * torch.multinomial(weights, pairs, generator=generator)  # (rows, pairs)
    found = blank(rows, length)
    if random_filler:
        found.symbols.random_(vocab, generator=generator)
    found.symbols[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
    found.symbols.scatter_(1, places, keys)
    found.answers.scatter_(1, places, values)
    found.distance.scatter_(1, places, places - torch.arange(1, 2 * pairs, 2))
    return found


def induction(rows: int, vocab: int, length: int, generator: Generator) -> Questions:
    """Generate induction-head sequences (Gu and Dao 2023, "Mamba", §E.1): predict what followed the special symbol.

    The special symbol is V − 1: once somewhere, and at the end, where the question is.
    """
    found = blank(rows, length)
    found.symbols.random_(vocab - 1, generator=generator)
    first = torch.randint(length - 2, (rows, 1), generator=generator)
    found.symbols.scatter_(1, first, vocab - 1)
    found.symbols[:, -1] = vocab - 1
    found.answers[:, -1:] = found.symbols.gather(1, first + 1)
    found.distance[:, -1:] = length - 1 - (first + 1)
    return found


def noisy_recall(rows: int, vocab: int, length: int, noise: float, generator: Generator) -> Questions:
    """Generate noisy in-context recall (Poli et al. 2024, "MAD", §3.1): key–value pairs among pairs of noise.

    Half of the symbols, V/2 … V − 1, are noise if `noise`, the share of pairs that are of noise, is above 0. Half of
    the others are keys, the rest values; each row has a value of its own for each key. The value is asked at each key
    that has been there before, as the last one has always.
    """
    spoken = vocab // 2 if noise else vocab
    keys, pairs = spoken // 2, length // 2
    table = torch.randint(keys, spoken, (rows, keys), generator=generator)
    key = torch.randint(keys, (rows, pairs), generator=generator)
    is_noise = torch.rand(rows, pairs, generator=generator) < noise
    shown = torch.randint(pairs - 1, (rows, 1), generator=generator)  # whose key comes again at the end
    key[:, -1:] = key.gather(1, shown)
    is_noise.scatter_(1, shown, False)
    is_noise[:, -1] = False
    found = blank(rows, length)
    value = table.gather(1, key)
    found.symbols[:, 0::2], found.symbols[:, 1::2] = key, value
    latest = _latest(key.masked_fill(is_noise, -1))
    asked = (latest >= 0) & ~is_noise
    found.answers[:, 0::2] = value.masked_fill(~asked, IGNORE)
    found.distance[:, 0::2] = (2 * (torch.arange(pairs) - latest) - 1).masked_fill(~asked, 0)
    if noise:
        tokens = torch.randint(spoken, vocab, (rows, length), generator=generator)
        found.symbols.copy_(torch.where(is_noise.repeat_interleave(2, 1), tokens, found.symbols))
    return found


def fuzzy_recall(rows: int, vocab: int, length: int, motif: int, generator: Generator) -> Questions:
    """Generate fuzzy in-context recall (Poli et al. 2024, §3.1): keys and values are motifs of 1 to `motif` symbols.

    The symbols of a motif differ. V − 1 fills the beginning; half of the others are of keys, half of values. The
    symbols of a value are asked, each one place before its own, where its key has been there before, as the last one
    has always.
    """
    half = (vocab - 1) // 2
    tokens, sizes = _motifs(half, motif)  # (M, motif), (M): those of keys; those of values are `half` further
    pairs = length // 2
    by_size = torch.randint(1, motif + 1, (2, rows, pairs), generator=generator)
    pick = torch.rand(2, rows, pairs, generator=generator)
    counts = sizes.bincount(minlength=motif + 1)
    first = counts.cumsum(0) - counts
    key, drawn = first[by_size] + (pick * counts[by_size]).long()  # (rows, pairs) each
    earlier = torch.randint(
        pairs // motif // 2, (rows, 1), generator=generator
    )  # from the end, so near that it is kept
    key[:, -1:] = key.gather(1, pairs - 2 - earlier)
    same = key.unsqueeze(2) == key.unsqueeze(1)  # (rows, pairs, pairs)
    value = drawn.gather(1, same.int().argmax(2))  # that of the key's first place
    both = torch.cat([tokens[key], tokens[value] + half * (tokens[value] >= 0)], dim=2)  # (rows, pairs, 2 motif)
    is_value = torch.arange(2 * motif) >= motif
    lengths = sizes[key] + sizes[value]
    kept = lengths.flip(1).cumsum(1).flip(1) <= length  # the last pairs, as many as fit
    latest = _latest(key.masked_fill(~kept, -1))
    asked = (latest >= 0) & kept
    there = (both >= 0) & kept.unsqueeze(2)
    place = (length - 1 - (there.flatten(1).flip(1).cumsum(1).flip(1) - 1)).view_as(both)  # of each symbol
    found = blank(rows, length + 1)  # one more at the end, for what is not there
    found.symbols.fill_(vocab - 1)
    found.symbols.scatter_(1, place.masked_fill(~there, length).flatten(1), both.clamp(min=0).flatten(1))
    wanted = there & asked.unsqueeze(2) & is_value
    at = (place - 1).masked_fill(~wanted, length).flatten(1)
    before = place.gather(1, latest.clamp(min=0).unsqueeze(2).expand_as(both))
    found.answers.scatter_(1, at, both.flatten(1))
    found.distance.scatter_(1, at, (place - 1 - before).flatten(1))
    return Questions(*(part[:, :length].contiguous() for part in found))


def selective_copy(rows: int, vocab: int, length: int, count: int, generator: Generator) -> Questions:
    """Generate selective copying (Poli et al. 2024, §3.1): symbols among blanks, to be repeated in order at the end.

    V − 2 is the blank, V − 1 tells to copy: `count` symbols anywhere, then V − 1, then `count` blanks, where they are
    asked.
    """
    found = blank(rows, length)
    found.symbols.fill_(vocab - 2)
    places = distinct(rows, count, 0, length - count - 1, generator).sort(1).values
    symbols = torch.randint(vocab - 2, (rows, count), generator=generator)
    found.symbols.scatter_(1, places, symbols)
    found.symbols[:, length - count - 1] = vocab - 1
    found.answers[:, length - count :] = symbols
    found.distance[:, length - count :] = torch.arange(length - count, length) - places
    return found


def compression(rows: int, vocab: int, length: int, generator: Generator) -> Questions:
    """Generate compression (Poli et al. 2024, §3.1): random symbols, all to be told from the state of a last V − 1."""
    found = blank(rows, length)
    found.symbols.random_(vocab - 1, generator=generator)
    found.symbols[:, -1] = vocab - 1
    found.answers[:, :-1] = found.symbols[:, :-1]
    found.distance[:, :-1] = length - 1 - torch.arange(length - 1)
    return found


def memorization(rows: int, vocab: int, length: int, facts: Tensor, generator: Generator) -> Questions:
    """Generate memorisation (Poli et al. 2024, §3.1): V − 1 after a key asks for its value, the same in all sequences.

    Args:
        facts: the value of each key 0 … K − 1, int64 (K).
    """
    found = blank(rows, length)
    keys = torch.randint(len(facts), (rows, length // 2), generator=generator)
    found.symbols[:, 0::2], found.symbols[:, 1::2] = keys, vocab - 1
    found.answers[:, 1::2] = facts[keys]
    return found


def _latest(keys: Tensor) -> Tensor:
    """Return the latest earlier place of each key, int64 (rows, N); −1 where there is none, or the key is negative."""
    places = torch.arange(keys.shape[1])
    same = (keys.unsqueeze(2) == keys.unsqueeze(1)) & (places < places.unsqueeze(1)) & (keys >= 0).unsqueeze(2)
    return torch.where(same, places, -1).amax(2)


def _motifs(symbols: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return all sequences of 1 … longest different symbols, −1 behind their ends: int64 (M, longest), and sizes."""
    motifs = [motif for size in range(1, longest + 1) for motif in permutations(range(symbols), size)]
    tokens = torch.tensor([motif + (-1,) * (longest - len(motif)) for motif in motifs])
    return tokens, torch.tensor([*map(len, motifs)])
