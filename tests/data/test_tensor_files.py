"""Files of features: the numbers as they were saved, or one line that names the file."""

import os

import pytest
import torch
from hypothesis import strategies as st

from kvt.data.features import FeatureFile
from kvt.data.tensor_files import read_features
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, SMALL, write_features
from tests.data.helpers import user_error
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, REPLACE, clear


def test_a_file_is_read_whole(tmp_path):
    write_features(tmp_path / "mine.pt", classes=3, width=5, train=4, test=2)
    source = FeatureFile(tmp_path / "mine.pt")
    assert source.feature_dim == 5
    source.prepare()
    written = torch.load(tmp_path / "mine.pt")
    for split, (features, labels) in source.load().items():
        assert torch.equal(features, written[split][0])
        assert torch.equal(labels, written[split][1])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision_and_labels_of_any_size(tmp_path, kind):
    pair = [torch.randn(4, 3).to(kind), torch.tensor([0, 1, 0, 1], dtype=torch.uint8)]
    torch.save({"train": pair, "test": pair, "more": "is ignored"}, tmp_path / "mine.pt")
    features, labels = read_features(tmp_path / "mine.pt")["test"]
    assert (features.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert torch.equal(features, pair[0].float())


def test_content_identifies_the_numbers_wherever_the_file_lies(tmp_path):
    contents = []
    for name, seed in (("one", 0), ("two", 1)):
        write_features(tmp_path / f"{name}.pt", classes=3, width=5, seed=seed)
        here = FeatureFile(tmp_path / f"{name}.pt").content
        (tmp_path / f"{name}.pt").rename(tmp_path / "moved.pt")
        assert FeatureFile(tmp_path / "moved.pt").content == here
        contents.append(here)
    assert contents[0] != contents[1]


class Program:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


X, Y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
GOOD = (X, Y)
MISTAKES = {
    "program": ({"train": GOOD, "test": Program()}, "is no readable file of features"),
    "no dictionary": ([GOOD, GOOD], "is no file of features"),
    "no test": ({"train": GOOD}, "is no file of features"),
    "no pair": ({"train": GOOD, "test": X}, "'test' is no pair of tensors"),
    "three": ({"train": GOOD, "test": (X, Y, Y)}, "'test' is no pair of tensors"),
    "no tensors": ({"train": ([1.0], [1]), "test": GOOD}, "'train' is no pair of tensors"),
    "images": ({"train": (torch.randn(4, 3, 2), Y), "test": GOOD}, "'train' has features of shape (4, 3, 2)"),
    "integers": ({"train": GOOD, "test": (Y[:, None], Y)}, "torch.int64, not (images, width) and floating"),
    "sparse": ({"train": GOOD, "test": (X.to_sparse(), Y)}, "'test' has features of shape"),
    "empty": ({"train": GOOD, "test": (X[:0], Y[:0])}, "'test' has features of shape (0, 3)"),
    "no width": ({"train": GOOD, "test": (X[:, :0], Y)}, "'test' has features of shape (4, 0)"),
    "unequal": ({"train": GOOD, "test": (X, Y[:3])}, "'test' has 4 features and labels of shape (3,)"),
    "widths": ({"train": GOOD, "test": (X[:, :2], Y)}, "'train' are 3 wide, of 'test' 2"),
    "nan": ({"train": (X * torch.nan, Y), "test": GOOD}, "'train' has features that are infinite or not a"),
    "infinite": ({"train": GOOD, "test": (X / 0, Y)}, "'test' has features that are infinite"),
    "beyond float32": ({"train": GOOD, "test": (X.double() * 1e300, Y)}, "'test' has features that are infinite"),
    "negative": ({"train": (X, Y - 1), "test": GOOD}, "'train' has labels (torch.int64)"),
    "floating": ({"train": (X, Y.float()), "test": GOOD}, "'train' has labels (torch.float32)"),
    "truth": ({"train": (X, Y.bool()), "test": GOOD}, "'train' has labels (torch.bool)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    content, words = MISTAKES[mistake]
    torch.save(content, tmp_path / "mine.pt")
    message = user_error(lambda: FeatureFile(tmp_path / "mine.pt"))
    assert message.startswith(str(tmp_path / "mine.pt"))
    assert words in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 broken zip"], ids=["empty", "junk", "zip"])
def test_files_that_cannot_be_read(tmp_path, content):
    (tmp_path / "mine.pt").write_bytes(content)
    assert "no readable file of features" in user_error(lambda: FeatureFile(tmp_path / "mine.pt"))
    assert "is missing" in user_error(lambda: FeatureFile(tmp_path / "nowhere.pt"))
    assert "is missing" in user_error(lambda: FeatureFile(tmp_path / "mine.pt" / "below.pt"))
    assert "is a folder" in user_error(lambda: FeatureFile(tmp_path))


def test_a_file_larger_than_memory(tmp_path, monkeypatch):
    write_features(tmp_path / "mine.pt", classes=3, width=5)
    monkeypatch.setattr("kvt.system.memory.free_memory", lambda: 1000)
    assert "memory" in user_error(lambda: FeatureFile(tmp_path / "mine.pt"))


def fit(*flags: str) -> None:
    short = ["--set_size", "4", "--val_size", "0.4", "--fast_dev_run", "1"]
    CLI(["fit", "--config", str(CONFIGS / "anomaly.yaml"), *QUIET, *SMALL["anomaly"], *short, *flags], test=True)


@fuzz(
    0.05,
    mistake=st.none() | st.sampled_from([*MISTAKES]),
    spoil=st.none() | CUT | FILL | REPLACE,
)
def test_files(held, in_tmp_dir, mistake, spoil):
    clear(in_tmp_dir)
    write_features(path := in_tmp_dir / "own.pt", classes=3, width=5, train=10)
    if mistake:
        torch.save(MISTAKES[mistake][0], path)
    whole = path.read_bytes()
    if spoil:
        spoil(path)
    line = held(lambda: fit("--features", "own.pt"), "own.pt")
    assert not (in_tmp_dir / "ran").exists()
    assert (line is None) == (mistake is None and path.is_file() and path.read_bytes() == whole)
