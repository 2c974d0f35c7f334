"""The cycles of a permutation, found by walking along them."""

from torch import Tensor


def cycles_of(successor: Tensor) -> list[list[int]]:
    """Return each cycle of a permutation as its tokens in order."""
    left: set[int] = set(range(len(successor)))
    found: list[list[int]] = []
    while left:
        found.append([left.pop()])
        while (following := int(successor[found[-1][-1]])) in left:
            left.remove(following)
            found[-1].append(following)
    return found
