"""Splits are apart; where the user's own data are not, `seen_in_training` counts it."""

import os
import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from kvt.data.tokens import END
from kvt.system import UserError
from kvt.tasks import Characters, DigitLists, Images, ImageTask, SentencePairs, TextTokens, datamodule
from tests.conftest import SMALL, write_images, write_sentences

REAL = Path(os.environ.get("KVT_DATA_DIR", "data")).resolve()


def rows(data, split) -> list[tuple]:
    return [tuple(row.flatten().tolist()) for row in data.splits[split][0]]


def require_apart(data) -> None:
    data.setup("fit")
    splits = [set(rows(data, split)) for split in data.splits]
    assert len(splits) > 1
    assert not any(one & other for one, other in combinations(splits, 2))
    assert data.seen_in_training == {split: 0 for split in data.splits if split != "train"}


# ---- lists ---------------------------------------------------------------------------------------


@given(length=st.integers(1, 3), share=st.lists(st.integers(1, 20), min_size=3, max_size=3), seed=st.integers(0, 2**32))
def test_lists_are_apart_even_if_there_are_only_just_enough(length, share, seed):
    sizes = [max(1, 10**length * part // sum(share)) for part in share]
    sizes[sizes.index(max(sizes))] -= max(0, sum(sizes) - 10**length)
    named = dict(zip(("train_size", "val_size", "test_size"), sizes, strict=True))
    data = DigitLists(length=length, **named, seed=seed)
    require_apart(data)
    assert [len(rows(data, split)) for split in data.splits] == sizes


def test_more_lists_than_there_are_is_refused():
    DigitLists(length=2, train_size=80, val_size=10, test_size=10).load()
    with pytest.raises(UserError, match="length=2 gives"):
        DigitLists(length=2, train_size=80, val_size=10, test_size=11)


# ---- texts ---------------------------------------------------------------------------------------


def test_the_order_of_the_vocabulary_depends_on_the_training_part_alone(tmp_path):
    """Characters that only the validation part has come last."""
    train = "abbcccdddd" * 20

    def vocab(val: str) -> list[str]:
        (tmp_path / "text.txt").write_text(train + val)
        size = len(val) / len(train + val)
        return Characters(text=str(tmp_path / "text.txt"), length=4, val_size=size).spec["vocab"]

    assert vocab("a" * 50) == vocab("c" * 50) == ["d", "c", "b", "a"]
    assert vocab("zzy" * 20) == ["d", "c", "b", "a", "z", "y"]


def lines(count: int) -> list[str]:
    """This many lines of random letters, of several lengths."""
    generator = torch.Generator().manual_seed(0)
    letters = [torch.randint(26, (20 + i % 13,), generator=generator).tolist() for i in range(count)]
    return ["".join(chr(97 + letter) for letter in line) for line in letters]


@pytest.mark.parametrize("loss_on", ["real", "all"])
def test_documents_that_training_has_too_are_counted(tmp_path, loss_on):
    (tmp_path / "t").mkdir()
    for i, text in enumerate(lines(20)):
        for name in ("original", "copy")[: 1 + i % 2]:
            (tmp_path / "t" / f"{i}-{name}.txt").write_text(text)
    data = TextTokens(text=str(tmp_path / "t"), length=16, val_size=0.3, loss_on=loss_on, data_dir=str(tmp_path))
    data.setup("fit")

    def documents(split):
        starts, stops, stream = data.splits[split]
        return "".join(data.tokens.additions(stream[starts[0] : stops[-1]].tolist())).split(END)[:-1]

    expected = sum(document in documents("train") for document in documents("val"))
    assert 0 < expected < len(documents("val"))
    assert data.seen_in_training == {"val": expected}


@pytest.mark.parametrize("make", [Characters, TextTokens])
def test_lines_of_a_single_text_that_training_has_too_are_counted(tmp_path, make):
    first, last = "\n".join(lines(14)[:7]), "\n".join(lines(14)[7:])
    for parts, expected in (([first, last], 0), ([first, first], 7), ([first, last, last], 7)):
        (tmp_path / "text.txt").write_text(text := "\n".join(parts))
        size = len(parts[-1]) / len(text)
        data = make(text=str(tmp_path / "text.txt"), length=12, val_size=size, data_dir=str(tmp_path))
        data.setup("fit")
        assert data.seen_in_training == {"val": expected}


# ---- the user's own data -------------------------------------------------------------------------


def test_images_that_training_has_too_are_counted(tmp_path):
    root = tmp_path / "mine"
    write_images(root, classes=3, size=28, mode="L", train=12, test=5)
    for label in (0, 1):  # into another class: the image counts, not its label
        shutil.copy(root / "train" / f"class{label}" / "3.png", root / "test" / f"class{label + 1}" / "twin.png")
    shutil.copy(root / "train" / "class2" / "0.png", root / "train" / "class2" / "again.png")
    data = Images(root=str(root), val_size=12, mean=[0.1], std=[0.3], data_dir=str(tmp_path))
    data.prepare_data()
    data.setup("fit")
    train = set(rows(data, "train"))
    expected = {split: sum(row in train for row in rows(data, split)) for split in ("val", "test")}
    assert sum(expected.values()) > 0
    assert data.seen_in_training == expected


def test_images_that_were_trained_on_are_no_validation(tmp_path):
    """The authors split CIFAR twice, unseeded. Of noise, a model knows those images by heart that it has seen."""
    write_images(tmp_path / "mine", classes=2, size=14, mode="L", train=60)
    data = Images(root=str(tmp_path / "mine"), val_size=60, mean=[0.5], std=[0.3], data_dir=str(tmp_path))
    data.prepare_data()
    data.setup("fit")
    torch.manual_seed(0)
    task = ImageTask(data.spec, dim=32, depth=1, heads=2, patch=7)
    optimizer = torch.optim.Adam(task.parameters(), lr=3e-3)

    def measure(split):
        pixels, labels = data.splits[split]
        logits = task(pixels)
        return cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

    for _ in range(60):
        optimizer.zero_grad()
        measure("train")[0].backward()
        optimizer.step()
    assert measure("train")[1] > 0.95
    assert measure("val")[1] < 0.7


def test_a_large_data_set_is_not_compared(monkeypatch):
    """It would take three seconds a million examples; the result then says nothing of it."""
    monkeypatch.setattr(datamodule, "MAX_COUNTED", 50)
    data = DigitLists(train_size=40, val_size=5, test_size=6)
    data.setup("fit")
    assert data.seen_in_training is None


def test_sentences_that_training_has_too_are_counted_in_the_result(tmp_path, experiment):
    root = tmp_path / "corpus"
    write_sentences(root, {"train": 22, "val": 6, "test": 5})
    train, test = ((root / f"{split}.de").read_text().splitlines() for split in ("train", "test"))
    (root / "test.de").write_text("\n".join([train[3], *test[1:]]))
    result = experiment("translation", *SMALL["translation"], "--root", str(root), "--max_epochs", "1")
    val = (root / "val.de").read_text().splitlines()
    seen = {"val": sum(line in train for line in val), "test": 1 + sum(line in train for line in test[1:])}
    assert result["seen_in_training"] == seen


@pytest.mark.real
def test_the_published_data_have_next_to_no_overlap(monkeypatch):
    monkeypatch.setattr(datamodule, "MAX_COUNTED", 10**7)
    pairs = SentencePairs(data_dir=str(REAL))
    pairs.setup("fit")
    assert pairs.seen_in_training == {"val": 1, "test": 0}
    for dataset in ("mnist", "fashion_mnist"):
        data = Images(dataset=dataset, val_size=5000, mean=[0.1], std=[0.3], data_dir=str(REAL))
        data.prepare_data()
        data.setup("fit")
        assert data.seen_in_training == {"val": 0, "test": 0}
    text = Characters(data_dir=str(REAL))
    text.setup("fit")
    assert text.seen_in_training == {"val": 581}  # of 3,535 lines, such as names of speakers
