"""Files of features: the numbers as they were saved, or one line that names the file; the data folder."""

import os

import pytest
import torch

from kvt.tasks.anomaly import FeatureFile
from tests.data.helpers import user_error

LABELS = (torch.uint8, torch.uint16, torch.int64, torch.int8)
FEATURES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(("kind", "labels"), zip(FEATURES, LABELS, strict=True))
def test_features_of_any_precision_and_labels_of_any_size_are_read_whole(tmp_path, kind, labels):
    sizes = {"train": 4, "test": 2}
    saved = {split: (torch.randn(n, 3).to(kind), torch.arange(n).to(labels)) for split, n in sizes.items()}
    torch.save({**saved, "more": "is ignored"}, tmp_path / "mine.pt")
    source = FeatureFile(tmp_path / "mine.pt")
    assert source.feature_dim == 3
    source.prepare()
    for split, (features, labels) in source.load().items():
        assert (features.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert torch.equal(features, saved[split][0].float())
        assert torch.equal(labels, saved[split][1].long())


class Program:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


X, Y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
GOOD = (X, Y)
INF = torch.tensor(torch.inf)
MISTAKES = {
    "program": {"train": GOOD, "test": Program()},
    "no dictionary": [GOOD, GOOD],
    "no test": {"train": GOOD},
    "unequal": {"train": GOOD, "test": (X, Y[:3])},
    "widths": {"train": GOOD, "test": (X[:, :2], Y)},
    "empty": {"train": GOOD, "test": (X[:0], Y[:0])},
    "negative": {"train": (X, Y - 1), "test": GOOD},
    "floating": {"train": (X, Y.float()), "test": GOOD},
    "infinite": {"train": GOOD, "test": (X.where(X[2].max() > X, INF), Y)},
    "beyond float32": {"train": (X.double() * 1e300, Y), "test": GOOD},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    torch.save(MISTAKES[mistake], tmp_path / "mine.pt")
    assert str(tmp_path / "mine.pt") in user_error(lambda: FeatureFile(tmp_path / "mine.pt"))
    assert not (tmp_path / "ran").exists()
