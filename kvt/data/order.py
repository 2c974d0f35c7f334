"""Random orders of rows, determined by a seed."""

from math import isqrt

import torch
from torch import Tensor

LARGE = 10**7  # largest number of rows for which `random_order` keeps all row numbers in memory, 8 bytes per row


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed for integers; seeds for similar integers are unrelated."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:  # a round like that of splitmix64 for each number
        state = (state ^ (number % 2**64)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def random_order(rows: int, seed: int) -> "Tensor | FeistelOrder":
    """Return 0 … rows − 1 in random order: a tensor int64 (rows,), or a `FeistelOrder` for more than `LARGE` rows."""
    if rows > LARGE:
        return FeistelOrder(rows, seed)
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


class FeistelOrder:
    """A pseudo-random permutation of 0 … rows − 1, of which only requested slices are computed, as int64 tensors.

    A position p = a + s b, with s = ⌈√rows⌉, is represented by (a, b). A round maps (a, b) to (b, (a + h(b)) mod s),
    where h is a hash with a different key in each round. The rounds form a Feistel network, which is a bijection on
    0 … s² − 1 for any h (Luby and Rackoff 1988). The network is applied again to each result that is not below `rows`,
    until all are below `rows` (cycle walking; Black and Rogaway 2002).

    >>> sorted(FeistelOrder(5, seed=0)[0:5].tolist())
    [0, 1, 2, 3, 4]
    """

    ROUNDS = 6

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.side = rows, isqrt(rows - 1) + 1
        self.keys = [derive_seed(seed, turn) for turn in range(self.ROUNDS)]

    def __getitem__(self, places: slice) -> Tensor:
        found = self._permuted(torch.arange(*places.indices(self.rows)))
        while len(outside := (found >= self.rows).nonzero().squeeze(1)):
            found[outside] = self._permuted(found[outside])
        return found

    def _permuted(self, numbers: Tensor) -> Tensor:
        a, b = numbers % self.side, numbers // self.side
        for key in self.keys:
            mixed = (b ^ key) * -0x61C8864680B583EB  # int64 overflow wraps around, as in splitmix64
            mixed = (mixed ^ (mixed >> 32)) * -0x40A7B892E31B1A47
            a, b = b, (a + (mixed ^ (mixed >> 29)) % self.side) % self.side
        return a + self.side * b
