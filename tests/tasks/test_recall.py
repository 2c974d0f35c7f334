"""Recall: what is asked can be looked up, and nothing else tells it."""

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.data.tokens import IGNORE
from kvt.system import UserError
from kvt.tasks import Recall, RecallTask
from kvt.tasks.recall import TASKS, distinct, mqar, slot_weights
from tests.conftest import SMALL
from tests.helpers.runs import read_history
from tests.tasks.test_splits import require_apart

SIZES = {
    "mqar": {"vocab": 20, "length": 24, "pairs": 4},
    "associative_recall": {"vocab": 10, "length": 9, "pairs": 4},
    "induction": {"vocab": 6, "length": 14},
    "selective_copy": {"vocab": 6, "length": 20, "pairs": 5},
}


def made(task: str, rows: int = 300, **settings) -> Recall:
    data = Recall(task, **SIZES[task] | settings, train_size=rows, val_size=30, test_size=30, batch_size=10)
    data.setup("fit")
    return data


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_apart_and_follow_from_the_seed(task):
    require_apart(data := made(task))
    again, other = made(task), made(task, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(data.splits["train"], again.splits["train"], strict=True))
    assert not torch.equal(data.splits["train"][0], other.splits["train"][0])


@pytest.mark.parametrize("task", TASKS)
def test_who_looks_back_by_the_distance_is_always_right(task):
    """Also in longer sequences, which the test has apart."""
    data = made(task, longest=100)
    lengths = {split: symbols.shape[1] for split, (symbols, *_) in data.splits.items()}
    longer = [data.length * 2**power for power in (1, 2, 3) if data.length * 2**power <= 100]
    assert lengths == dict.fromkeys(("train", "val", "test"), data.length) | {f"test_{n}": n for n in longer}
    for symbols, answers, distance in data.splits.values():
        asked = answers != IGNORE
        assert asked.any(1).all()
        rows, places = asked.nonzero(as_tuple=True)
        assert (distance[asked] > 0).all()
        assert torch.equal(symbols[rows, places - distance[asked]], answers[asked])
        assert not distance[~asked].any()


@pytest.mark.parametrize("vocab", [16, 21])
@pytest.mark.parametrize("task", TASKS)
def test_chance_is_to_name_any_symbol_that_is_ever_an_answer(task, vocab):
    data = made(task, rows=2000, vocab=vocab)
    answers = data.splits["train"][1]
    assert 1 / data.spec["chance"] == len(answers[answers != IGNORE].unique())


def looked_up(row: torch.Tensor, place: int) -> int:
    """The symbol behind the latest place of the symbol at `place`."""
    (before,) = (row[:place] == row[place]).nonzero(as_tuple=True)
    return int(row[before[-1] + 1])


@pytest.mark.parametrize("task", ["mqar", "induction"])
def test_an_oracle_that_looks_up_the_symbol_gets_all_and_a_bigram_model_gets_chance(task):
    """The bigram model knows which answers followed each symbol in training, most frequent first."""
    data = made(task, rows=4000)
    symbols, answers, _ = data.splits["train"]
    asked = answers != IGNORE
    for row, place in asked.nonzero()[:400].tolist():
        assert looked_up(symbols[row], place) == answers[row, place]
    vocab = data.vocab
    pairs = symbols[asked] * vocab + answers[asked]
    counts = pairs.bincount(minlength=vocab**2).view(vocab, vocab)
    held_symbols, held_answers, _ = made(task, rows=4000, seed=1).splits["train"]
    held = held_answers != IGNORE
    right = (counts.argmax(1)[held_symbols[held]] == held_answers[held]).double()
    chance = Recall.chance(task, vocab=vocab)
    independent = len(held)  # rows; questions of one row are not
    assert abs(right.mean() - chance) < 5 * sqrt(chance * (1 - chance) / independent) + 0.01


@given(
    pairs=st.integers(1, 6),
    extra=st.integers(0, 5),
    more=st.integers(0, 9),
    filler=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mqar_has_pairs_first_and_each_key_once_more(pairs, extra, more, filler, seed):
    vocab, length = 2 * (pairs + 1 + more), 4 * pairs + 2 * extra
    symbols, answers, _ = mqar(5, vocab, length, pairs, filler, generator(seed))
    keys, values = symbols[:, : 2 * pairs : 2], symbols[:, 1 : 2 * pairs : 2]
    for row in range(5):
        assert len(keys[row].unique()) == len(values[row].unique()) == pairs
        (places,) = (answers[row] != IGNORE).nonzero(as_tuple=True)
        assert sorted(symbols[row, places].tolist()) == sorted(keys[row].tolist())
        assert (places >= 2 * pairs).all()
        assert (places % 2 == 0).all()
        rest = symbols[row, 2 * pairs :][answers[row, 2 * pairs :] == IGNORE]
        assert filler or not rest.any()
    assert keys.min() >= 1
    assert keys.max() < vocab // 2 <= values.min()


def test_the_gaps_of_mqar_follow_the_power_law():
    """With one pair, slot g has p(g) ∝ (g + 1)^(0.01 − 1)."""
    rows, length = 20_000, 64
    _, answers, _ = mqar(rows, 64, length, 1, False, generator(0))
    slots = (answers != IGNORE).int().argmax(1).sub(2) // 2
    expected = torch.arange(1.0, 32.0).double() ** -0.99
    expected /= expected.sum()
    torch.testing.assert_close(slot_weights(31), expected)
    found = slots.bincount(minlength=31) / rows
    assert ((found - expected).abs() < 5 * (expected * (1 - expected) / rows).sqrt()).all()


def test_each_order_of_distinct_numbers_is_as_likely():
    rows = 24_000
    drawn = distinct(rows, 2, 0, 4, generator(0))
    counts = (4 * drawn[:, 0] + drawn[:, 1]).bincount(minlength=16)
    possible = counts[counts > 0] / rows
    assert len(possible) == 12
    assert ((possible - 1 / 12).abs() < 5 * sqrt(1 / 12 * 11 / 12 / rows)).all()


def test_the_accuracies_by_number_of_questions_add_up_to_that_of_the_test(experiment):
    result = experiment("mqar", *SMALL["mqar"], "--test_size", "200", "--fewest_pairs", "1")
    data = Recall(**{**result["config"]["data"]["init_args"], "seed": 0, "data_dir": None})
    data.setup("test")
    assert result["notes"]["chance"] == "0.125"
    times = (data.splits["test"][1] != IGNORE).sum(1)
    by_number = {name: value for name, value in result.items() if name.endswith("_asked")}
    assert by_number.keys() == {"test/acc_1_asked", "test/acc_2_asked"}
    right = sum(number * (times == number).sum() * by_number[f"test/acc_{number}_asked"] for number in (1, 2))
    assert right / times.sum() == pytest.approx(result["test/acc"])


@pytest.mark.parametrize("vocab", [16, 64])
def test_each_number_of_pairs_is_as_likely_in_all_splits_and_at_any_row(vocab):
    """Where one pair makes few sequences, too: of 16 symbols 1,736, and 3,000 rows have them."""
    sizes = {"train": 12_000, "val": 2_000, "test": 2_000}
    data = Recall(
        "mqar", vocab=vocab, pairs=4, fewest_pairs=1, **{f"{name}_size": size for name, size in sizes.items()}
    )
    data.setup("fit")
    require_apart(data)
    for split, rows in sizes.items():
        pairs = (data.splits[split][1] != IGNORE).sum(1)
        for part in (pairs, pairs[: rows // 4], pairs[-rows // 4 :]):
            counts = part.bincount(minlength=5)[1:]
            assert counts.sum() == len(part)
            assert ((counts / len(part) - 1 / 4).abs() < 5 * sqrt(1 / 4 * 3 / 4 / len(part))).all()


@pytest.mark.parametrize("task", TASKS)
def test_all_splits_have_the_same_distribution_though_few_sequences_are_possible(task):
    """Of the number of questions, and of how far back their answers stand."""
    small = {
        "mqar": {"vocab": 16, "length": 16, "pairs": 4, "fewest_pairs": 1},
        "associative_recall": {"vocab": 8, "length": 7, "pairs": 3},
        "induction": {"vocab": 5, "length": 8},
        "selective_copy": {"vocab": 12, "length": 12, "pairs": 3},
    }
    data = Recall(task, **small[task], train_size=8_000, val_size=1_000, test_size=1_000)
    require_apart(data)
    found = {}
    for split, (symbols, answers, distance) in data.splits.items():
        asked = (answers != IGNORE).sum(1).double()
        found[split] = asked, distance.sum(1) / asked, len(symbols.unique(dim=0))
    asked, back, _ = found["train"]
    for split in ("val", "test"):
        own_asked, own_back, distinct_rows = found[split]
        assert abs(own_asked.mean() - asked.mean()) <= 5 * asked.std() / sqrt(len(own_asked))
        # some sequences of many, which repeat, make a mean less certain
        assert abs(own_back.mean() - back.mean()) <= 5 * back.std() / sqrt(distinct_rows)


def test_a_setting_that_makes_too_few_sequences_is_named():
    """Six symbols make 18 sequences of one pair and 24 of two."""
    data = Recall("mqar", vocab=8, length=12, pairs=3, fewest_pairs=1, train_size=90, val_size=90, test_size=90)
    data.setup("fit")
    require_apart(data)
    data = Recall("mqar", vocab=6, length=8, pairs=2, fewest_pairs=1, train_size=90, val_size=90, test_size=90)
    with pytest.raises(UserError, match="fewest_pairs=1 make too few sequences"):
        data.setup("fit")


def test_longer_sequences_are_tested_apart(experiment):
    """The attention without positions, which learns little here, gets the same of each length in its own test."""
    words = [*SMALL["induction"], "--positions", "none", "--longest", "50"]
    result, plain = experiment("induction", *words), experiment("induction", *words[:-2])
    by_length = {name: result.pop(name) for name in [*result] if name.endswith("_long")}
    assert by_length.keys() == {f"test/acc_{length}_long" for length in (12, 24, 48)}
    assert by_length["test/acc_12_long"] == result["test/acc"] == plain["test/acc"]
    assert not any(name.endswith("_long") for name in plain)


def test_training_stops_at_the_accuracy_that_is_asked_for(experiment):
    words = [*SMALL["mqar"], "--max_epochs", "3", "--stop_at"]
    whole, stopped = experiment("mqar", *words, "1.1"), experiment("mqar", *words, "0.001")
    assert stopped["val/acc"] >= 0.001
    assert "stopped" not in whole["notes"]
    assert stopped["notes"]["stopped"] == "at an accuracy of 0.001 in validation"
    last = [int(read_history(run["path"].parent)[-1]["step"]) for run in (whole, stopped)]
    assert last == [18, 6]


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("mqar", {"pairs": 4, "length": 12}),
        ("mqar", {"pairs": 8, "vocab": 16, "length": 64}),
        ("associative_recall", {"pairs": 6, "length": 12}),  # the key would replace the last value
        ("induction", {"vocab": 2}),
        ("selective_copy", {"pairs": 6, "length": 12}),
    ],
)
def test_a_sequence_that_cannot_hold_its_pairs_is_refused(task, settings):
    with pytest.raises(UserError, match=f"{task} with pairs=. needs vocab >= .* and length >= "):
        Recall(task, **settings)


@pytest.mark.parametrize("causal", [True, False])
def test_the_future_reaches_what_stands_before_it_only_without_a_causal_mask(causal):
    data = made("mqar")
    task = RecallTask(data.spec, attn="qkv", dim=16, causal=causal).eval()
    task.check_causality()
    symbols = data.splits["train"][0][:4]
    changed = symbols.clone()
    changed[:, -1] = (changed[:, -1] + 1) % data.vocab
    same = torch.equal(task(symbols)[:, :-1], task(changed)[:, :-1])
    assert same is causal
