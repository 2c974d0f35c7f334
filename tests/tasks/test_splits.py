"""What is held out is held out: by its content, and where data of the user's own are not, the result says so."""

import os
import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvt.data.loader import derive_seed
from kvt.system.errors import UserError
from kvt.tasks import Characters, DigitLists, HumanNumbers, Images, SentencePairs, SetAnomalies
from tests.conftest import CONFIGS, SMALL, SMALL_LISTS, write_features, write_images, write_sentences

LISTS = ("reverse", "sort", "swap", "sub", "copy")
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


@pytest.mark.parametrize("config", LISTS)
def test_lists_are_apart_as_shipped(config):
    settings = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())["data"]["init_args"]
    require_apart(DigitLists(**settings))


@given(length=st.integers(1, 3), share=st.lists(st.integers(1, 20), min_size=3, max_size=3), seed=st.integers(0, 2**32))
def test_lists_are_apart_even_where_there_are_only_just_enough(length, share, seed):
    sizes = [max(1, 10**length * part // sum(share)) for part in share]
    sizes[sizes.index(max(sizes))] -= max(0, sum(sizes) - 10**length)
    data = DigitLists(
        length=length, **dict(zip(("train_size", "val_size", "test_size"), sizes, strict=True)), seed=seed
    )
    require_apart(data)
    assert [len(rows(data, split)) for split in data.splits] == sizes


def test_what_is_drawn_anew_is_as_likely_as_any_other():
    """Of the lists of two digits that neither training nor validation has, about sixty, each is as likely in test."""
    counts: Counter = Counter()
    left: Counter = Counter()
    for seed in range(150):
        data = DigitLists(length=2, train_size=40, val_size=10, test_size=50, seed=seed)
        data.setup("fit")
        counts.update(rows(data, "test"))
        free = {(i, j) for i in range(10) for j in range(10)} - {*rows(data, "train"), *rows(data, "val")}
        left.update({content: 50 / len(free) for content in free})
    for content, expected in left.items():
        assert abs(counts[content] - expected) < 5 * expected**0.5


@pytest.mark.parametrize("task", LISTS)
def test_lists_that_coincide_nowhere_are_those_that_were_drawn(task):
    """Each split from its own stream, by the seed alone: nothing is drawn anew without need."""
    data = DigitLists(task=task, train_size=300, val_size=40, test_size=50, seed=7)
    for stream, (inputs, _) in enumerate(data.load().values()):
        generator = torch.Generator().manual_seed(derive_seed(7, stream))
        assert torch.equal(inputs, torch.randint(10, inputs.shape, generator=generator))


@pytest.mark.parametrize(("length", "sizes"), [(4, []), (1, SMALL_LISTS), (2, SMALL_LISTS)], ids=["4", "1", "2"])
def test_lists_too_short_to_be_apart_are_refused(mistake, experiment, length, sizes):
    assert f"length={length}" in mistake(experiment, "reverse", *sizes, "--length", str(length))


def test_as_many_lists_as_there_are_will_do_and_one_more_will_not():
    DigitLists(length=2, train_size=80, val_size=10, test_size=10).load()
    with pytest.raises(UserError, match="length=2 makes"):
        DigitLists(length=2, train_size=80, val_size=10, test_size=11)


# ---- texts: where a symbol stands is what it is ---------------------------------------------------


@pytest.mark.parametrize(("length", "val_size"), [(3, 0.1), (16, 0.5), (7, 0.33)])
def test_no_window_of_training_reaches_into_the_rest(tmp_path, length, val_size):
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 200)))  # each character once
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    data = Characters(text=str(tmp_path / "text.txt"), length=length, val_size=val_size, batch_size=4)
    data.setup("fit")
    seen = {
        split: {*inputs.flatten().tolist(), *targets.flatten().tolist()}
        for split, (inputs, targets) in data.splits.items()
    }
    assert len(seen["train"]) == round(200 * (1 - val_size))
    assert not seen["train"] & {*data.splits["val"][1].flatten().tolist()}
    assert not seen["train"] & {int(data.splits["val"][0][0, 0])}


def test_numbering_tells_training_nothing_of_the_rest(tmp_path):
    """However often a symbol stands in the rest; one that stands there alone comes last."""
    begun = "abbcccdddd" * 20

    def symbols(rest: str) -> list[str]:
        (tmp_path / "text.txt").write_text(begun + rest)
        return Characters(text=str(tmp_path / "text.txt"), length=4, val_size=len(rest) / len(begun + rest)).spec[
            "vocab"
        ]

    assert symbols("a" * 50) == symbols("c" * 50) == ["d", "c", "b", "a"]
    assert symbols("zzy" * 20) == ["d", "c", "b", "a", "z", "y"]


@pytest.mark.parametrize("length", [2, 16, 64])
def test_no_word_of_the_numbers_is_learned_and_predicted(length):
    data = HumanNumbers(length=length)
    data.text = data.vocab = [f"word{i}" for i in range(9000)]  # each once
    data.setup("fit")
    (inputs, targets), (_, held_out) = data.splits["train"], data.splits["val"]
    assert not {*inputs.flatten().tolist(), *targets.flatten().tolist()} & {*held_out.flatten().tolist()}


# ---- data of the user's own may be there twice: that is counted ----------------------------------


def test_images_that_training_has_too_are_counted(tmp_path, experiment):
    write_images(tmp_path / "mine", classes=3, size=28, mode="L", train=12, test=5)
    for label in (0, 1):  # into another class: what is seen counts, not its label
        twin = tmp_path / "mine" / "test" / f"class{label + 1}" / "twin.png"
        shutil.copy(tmp_path / "mine" / "train" / f"class{label}" / "3.png", twin)
    shutil.copy(tmp_path / "mine" / "train" / "class2" / "0.png", tmp_path / "mine" / "train" / "class2" / "again.png")
    flags = [*SMALL["mnist"], "--root", str(tmp_path / "mine"), "--val_size", "12", "--max_epochs", "1"]
    result = experiment("mnist", *flags)
    data = Images(root=str(tmp_path / "mine"), val_size=12, mean=[0.1], std=[0.3], data_dir=str(tmp_path))
    data.prepare_data()
    data.setup("fit")
    train = set(rows(data, "train"))
    expected = {split: sum(row in train for row in rows(data, split)) for split in ("val", "test")}
    assert sum(expected.values()) > 0
    assert result["seen_in_training"] == expected


def test_features_that_training_has_too_are_counted(tmp_path):
    write_features(tmp_path / "mine.pt", classes=4, width=8, train=30, test=11)
    splits = torch.load(tmp_path / "mine.pt")
    splits["test"][0][5] = splits["train"][0][7]
    splits["test"][0][6] = splits["test"][0][8]  # twice in one split is no leak
    torch.save(splits, tmp_path / "mine.pt")
    data = SetAnomalies(features=str(tmp_path / "mine.pt"), set_size=4, val_size=0.2)
    data.setup("fit")
    in_training = any(torch.equal(splits["train"][0][7], row) for row in data.splits["train"][0])
    assert data.seen_in_training == {"val": 0, "test": int(in_training)}
    assert in_training  # or this test would show nothing


def test_sentences_that_training_has_too_are_counted(tmp_path, experiment, capsys):
    root = tmp_path / "corpus"
    write_sentences(root, {"train": 22, "val": 6, "test": 5})
    train, test = ((root / f"{split}.de").read_text().splitlines() for split in ("train", "test"))
    (root / "test.de").write_text("\n".join([train[3], *test[1:]]))
    result = experiment("translation", *SMALL["translation"], "--root", str(root), "--max_epochs", "1")
    val = (root / "val.de").read_text().splitlines()
    assert result["seen_in_training"] == {
        "val": sum(line in train for line in val),
        "test": 1 + sum(line in train for line in test[1:]),
    }
    assert "seen_in_training" in capsys.readouterr().out


def test_a_text_that_repeats_itself_is_told(experiment, in_tmp_dir):
    """Of 200 characters that are there four times over, every window of the last one has been seen."""
    generator = torch.Generator().manual_seed(0)
    letters = "".join(chr(97 + i) for i in torch.randint(26, (200,), generator=generator).tolist())
    for name, text in (("once", letters), ("often", letters * 4)):
        Path(f"{name}.txt").write_text(text)
    found = {
        name: experiment("characters", *SMALL["characters"], "--text", f"{name}.txt", "--val_size", "0.25")[
            "seen_in_training"
        ]
        for name in ("once", "often")
    }
    assert found["once"] == {"val": 0}
    assert found["often"] == {"val": 16}  # whole windows of 12; the last is filled up


@pytest.mark.real
def test_what_is_known_of_the_published_data():
    pairs = SentencePairs(data_dir=str(REAL))
    pairs.splits = dict.fromkeys(pairs.texts, ())
    assert pairs.seen_in_training == {"val": 1, "test": 0}
    for dataset in ("mnist", "fashion_mnist"):
        data = Images(dataset=dataset, val_size=5000, mean=[0.1], std=[0.3], data_dir=str(REAL))
        data.prepare_data()
        data.setup("fit")
        assert data.seen_in_training == {"val": 0, "test": 0}
    text = Characters(data_dir=str(REAL))
    text.setup("fit")
    assert text.seen_in_training == {"val": 0}
