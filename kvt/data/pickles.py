"""Pickles that say a thing over and over again."""

from collections.abc import Iterator
from pickletools import OpcodeInfo, genops, markobject
from typing import BinaryIO

MOST = 16
"""How many values a byte may stand for."""


def require_terse(pickled: bytes) -> None:
    """Makes sure that no value in a pickle is much larger, written out in full, than the pickle.

    A tuple of twice the same tuple, which is twice the same tuple, and so on, takes a few bytes. As the key of a
    dictionary Python takes years to hash it, and nothing but a kill can stop that.

    Raises:
        Exception: one is, or it is no pickle.
    """
    stack: list[int | None] = []  # the size of each value; None where a mark is
    memo: dict[int, int] = {}
    for opcode, argument, _ in genops(pickled):
        if opcode.name.endswith("GET"):
            stack.append(memo[int(argument or 0)])
        elif opcode.name.endswith("PUT") or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = stack[-1] or 0
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            size = 1 + sum(_taken(opcode, stack))
            if size > MOST * len(pickled):
                raise ValueError("it says the same over and over again")
            stack += [size] * len(opcode.stack_after)


def require_terse_pickles(file: BinaryIO, count: int) -> None:
    """Makes sure of the same of each pickle that a file begins with.

    Raises:
        Exception: of one it is not so, or there are fewer.
    """
    for _ in range(count):
        start = file.tell()
        for _ in genops(file):
            pass
        end = file.tell()
        file.seek(start)
        require_terse(file.read(end - start))


def _taken(opcode: OpcodeInfo, stack: list[int | None]) -> Iterator[int]:
    """The sizes of the values that an operation takes from the stack."""
    before = opcode.stack_before
    if markobject in before:
        while (size := stack.pop()) is not None:
            yield size
        before = before[: before.index(markobject)]
    for _ in before:
        yield stack.pop() or 0
