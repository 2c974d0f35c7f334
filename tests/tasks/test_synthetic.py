"""The five list tasks: what they must satisfy."""

import pytest
import torch

from kvt.system.errors import UserError
from kvt.tasks.synthetic import TASKS, DigitLists


def test_the_papers_examples():
    digits = torch.tensor([4, 3, 9, 8, 1])
    assert TASKS["reverse"](digits).tolist() == [1, 8, 9, 3, 4]
    assert TASKS["sort"](digits).tolist() == [1, 3, 4, 8, 9]
    assert TASKS["swap"](torch.tensor([4, 3, 9, 8, 1, 7])).tolist() == [8, 1, 7, 4, 3, 9]
    assert TASKS["sub"](digits).tolist() == [5, 6, 0, 1, 8]
    assert TASKS["copy"](digits).tolist() == [4, 3, 9, 8, 1]


@pytest.mark.parametrize("task", TASKS)
def test_splits_have_the_given_sizes_and_targets(task):
    data = DigitLists(task=task, length=16, train_size=50, val_size=40, test_size=40, batch_size=8)
    data.setup("fit")
    assert {name: x.shape for name, (x, _) in data.splits.items()} == {
        "train": (50, 16),
        "val": (40, 16),
        "test": (40, 16),
    }
    for x, y in data.splits.values():
        assert torch.equal(y, TASKS[task](x))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"task": "revers"}, "reverse"), ({"length": 0}, "length=0"), ({"task": "swap", "length": 7}, "length=7")],
)
def test_mistakes_are_named(settings, named):
    with pytest.raises(UserError, match=named):
        DigitLists(**settings)
