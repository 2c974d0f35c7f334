"""The list tasks: what they must satisfy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.attention import cycle_lengths
from kvt.system import UserError
from kvt.tasks.lists import DigitLists


def lists(task, length=6, **settings):
    return DigitLists(task=task, length=length, train_size=4, val_size=2, test_size=2, **settings)


@pytest.mark.parametrize(
    ("task", "digits", "becomes"),
    [
        ("reverse", [4, 3, 9, 8, 1], [1, 8, 9, 3, 4]),
        ("sort", [4, 3, 9, 8, 1], [1, 3, 4, 8, 9]),
        ("swap", [4, 3, 9, 8, 1, 7], [8, 1, 7, 4, 3, 9]),
        ("sub", [4, 3, 9, 8, 1], [5, 6, 0, 1, 8]),
        ("copy", [4, 3, 9, 8, 1], [4, 3, 9, 8, 1]),
    ],
)
def test_the_papers_examples(task, digits, becomes):
    assert lists(task, len(digits)).targets(torch.tensor(digits)).tolist() == becomes


@given(length=st.integers(2, 40), cycle=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_a_permutation_has_cycles_of_one_length_and_fixed_points(length, cycle, seed):
    cycle = min(cycle, length)
    data = lists("permute", length, cycle=cycle, seed=seed)
    many, rest = divmod(length, cycle)
    assert cycle_lengths(data.permutation) == sorted([1] * rest + [cycle] * many)
    digits = torch.randint(10, (3, length))
    assert all(torch.equal(data.targets(digits)[:, i], digits[:, j]) for i, j in enumerate(data.permutation))


@pytest.mark.parametrize("settings", [{"task": "swap", "length": 7}, {"task": "permute", "cycle": 17}])
def test_a_task_that_the_length_does_not_allow_is_refused(settings):
    with pytest.raises(UserError, match="length="):
        DigitLists(**settings)


def test_every_seed_has_a_permutation_of_its_own():
    assert len({tuple(lists("permute", 16, cycle=2, seed=seed).permutation.tolist()) for seed in range(100)}) == 100


@given(length=st.integers(2, 40), by=st.integers(-50, 50))
def test_a_shift_moves_every_digit_by_as_many_places(length, by):
    moved = lists("shift", length, by=by).targets(torch.arange(length))
    assert moved.tolist() == [(i + by) % length for i in range(length)]
