"""Windows of texts, numbers in words, and what language models write."""

import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data.tokens import END, IGNORE, Vocabulary
from kvt.models.embedding import POSITIONS, LearnedPositions, SinusoidalPositions
from kvt.tasks import Characters, CharacterTask, HumanNumbers, LanguageModelTask, NumberTask, TextTokens
from kvt.tasks.language import TextData
from tests.data.helpers import all_rows

TEXT = "Es war einmal ein König, der hatte eine Tochter. " * 9 + "Das ist das Ende!"
SMALL = {"dim": 12, "depth": 1, "heads": 2}


def characters(tmp_path, text=TEXT, **settings) -> Characters:
    (tmp_path / "tale.txt").write_text(text, encoding="utf-8")
    return Characters(text=str(tmp_path / "tale.txt"), **{"length": 8, "batch_size": 3, "val_size": 0.2, **settings})


@pytest.fixture(params=["characters", "numbers"])
def trial(request, tmp_path):
    """A task whose predictions are far from uniform."""
    torch.manual_seed(0)
    if request.param == "characters":
        data = characters(tmp_path)
        task = CharacterTask(data.spec, dropout=0.0, **SMALL)
    else:
        data = HumanNumbers(val_size=0.01, batch_size=7)
        task = NumberTask(data.spec, dropout=0.0, feed_forward_dropout=0.0, **SMALL)
    with torch.no_grad():
        task.model.head.weight.mul_(3)
    return task.eval()


# ---- windows -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(symbols=st.lists(st.integers(0, 9), min_size=1, max_size=60), length=st.integers(1, 20))
def test_every_symbol_but_the_first_is_predicted_once_from_those_before(symbols, length):
    class Plain(TextData):
        def load(self):
            self.length = length
            return {"val": self.adjacent(torch.tensor(symbols), 0, len(symbols))}

    data = Plain()
    data.setup("validate")
    if len(symbols) == 1:
        assert not len(data.splits["val"][0])
        return
    inputs, targets = all_rows(data, "val")
    assert inputs.shape == targets.shape == (-(-(len(symbols) - 1) // length), length)
    real = targets != IGNORE
    assert targets[real].tolist() == symbols[1:]
    assert inputs[real].tolist() == symbols[:-1]


@pytest.mark.parametrize(("length", "val_size"), [(8, 0.2), (64, 0.1), (1, 0.013)])
def test_train_and_val_are_the_two_parts_of_the_text(tmp_path, length, val_size):
    data = characters(tmp_path, length=length, val_size=val_size)
    data.setup("fit")
    (train, next_train), (val, next_val) = (all_rows(data, split) for split in ("train", "val"))
    decode = Vocabulary(data.spec["vocab"]).decode
    real = next_val != IGNORE
    train_text = "".join(decode([*train[:, 0].tolist(), *next_train[-1].tolist()]))
    val_text = "".join(decode([val[0, 0].item(), *next_val[real].tolist()]))
    assert train_text + val_text == TEXT
    assert len(val_text) == round(val_size * len(TEXT)) == real.sum() + 1
    for row, (symbols, following) in enumerate(zip(train, next_train, strict=True)):
        assert "".join(decode(symbols.tolist())) == TEXT[row : row + length]
        assert "".join(decode(following.tolist())) == TEXT[row + 1 : row + 1 + length]


# ---- numbers in words ----------------------------------------------------------------------------

ONES = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen"""
TENS = """twenty thirty forty fifty sixty seventy eighty ninety"""
VALUES = {word: value for value, word in enumerate(ONES.split(), start=1)}
VALUES |= {word: 10 * tens for tens, word in enumerate(TENS.split(), start=2)}


def read(words: list[str]) -> int:
    total = current = 0
    for word in words:
        if word in VALUES:
            current += VALUES[word]
        else:
            total, current = total + current * {"thousand": 1000, "hundred": 100}[word], 0
    return total + current


def test_the_counting_text_is_the_published_one():
    data = HumanNumbers()
    numbers = [read(words.split()) for words in " ".join(data.text).split(" . ")]
    assert numbers == [number for number in range(1, 10_000) if number != 8000]
    assert (len(numbers), len(data.text), len(data.spec["vocab"])) == (9998, 63_095, 30)


@pytest.mark.parametrize(("length", "windows"), [(16, 3943), (9, 7010)])
def test_four_windows_of_five_train_and_the_rest_of_the_text_validates(length, windows):
    data = HumanNumbers(length=length)
    data.setup("fit")
    text = Vocabulary(data.spec["vocab"]).encode(data.text)
    (train, next_train), (val, next_val) = (all_rows(data, split) for split in ("train", "val"))
    assert len(train) + len(val) == windows
    assert len(train) == int(0.8 * windows)
    assert torch.cat([train, val]).flatten().tolist() == text[: windows * length]
    assert torch.cat([next_train, next_val]).flatten().tolist() == text[1 : windows * length + 1]


# ---- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "usual"), [(CharacterTask, LearnedPositions), (NumberTask, SinusoidalPositions)])
def test_a_model_has_the_positions_that_are_asked_for(task, usual):
    spec, sizes = {"vocab": list("abcde"), "length": 8}, {"dim": 64, "depth": 1, "heads": 2}
    assert type(task(spec, **sizes).model.embedding) is usual
    for positions, cls in POSITIONS.items():
        rotated = {} if positions == "rotary" else {"rope": 1.0}
        model = task(spec, **sizes, positions=positions, attn_kwargs=rotated).eval().model
        assert model.encoder[0].attention.layer.rotary.channels == 32
        assert type(model.embedding) is cls
        assert model.is_endless == (positions in ("none", "rotary"))
        assert model.embedding.scale == (8 if task is NumberTask or positions == "sinusoidal" else 1)


# ---- generated text ----------------------------------------------------------------------------


def test_a_text_of_characters_is_composed(tmp_path):
    """A decomposed text, prompt or stop is the same as a composed one. Bytes stay as they are."""
    made, texts = [], []
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, "Größe, schöne Käse. " * 20)
        (tmp_path / f"{form}.txt").write_text(text, encoding="utf-8")
        made.append(Characters(text=str(tmp_path / f"{form}.txt"), length=8))
        made[-1].setup("fit")
        texts.append(TextTokens(text=str(tmp_path / f"{form}.txt"), length=8, data_dir=str(tmp_path)).load())
    composed, decomposed = made
    assert (composed.spec, composed.content) == (decomposed.spec, decomposed.content)
    assert len(texts[0]["train"][2]) < len(texts[1]["train"][2])
    task = CharacterTask(composed.spec, dim=12, depth=1, heads=1).eval()
    spoken = [unicodedata.normalize(form, "schö") for form in ("NFC", "NFD")]
    assert len({task.generate(prompt, 9) for prompt in spoken}) == 1
    whole = task.generate("schö", 100)
    assert "ö" in whole[4:]
    stops = [unicodedata.normalize(form, "ö") for form in ("NFC", "NFD")]
    assert {task.generate(spoken[0], 100, stop=stop) for stop in stops} == {whole[: whole.index("ö", 4) + 1]}


def test_a_text_ends_with_what_it_is_to_stop_at(trial):
    prompt = trial.vocabulary.separator.join(trial.vocabulary.vocab[2:6])
    whole = "".join(trial.write(prompt, 30))
    added = whole.removeprefix(prompt)
    for first, last in ((0, 1), (3, 4), (5, 12), (len(added) - 4, len(added))):
        stop = added[first:last]
        assert "".join(trial.write(prompt, 30, stop=stop)) == prompt + added[: added.index(stop) + len(stop)]
    assert "".join(trial.write(prompt, 30, stop="\0")) == whole


def test_a_text_shows_where_the_model_ends_a_document_and_can_stop_there():
    task = LanguageModelTask({"tokenizer": "bytes", "length": 8}, dim=8, depth=1, heads=2).eval()
    end = task.vocabulary.end
    with torch.no_grad():
        task.model.head.bias[end] = 100.0
    assert "".join(task.write("abc", 3)) == "abc" + 3 * END
    assert "".join(task.write("abc", 3, stop=END)) == "abc" + END
    assert END in task.sample()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_begins_with_its_prompt_and_depends_on_the_seed_alone(trial, temperature):
    separator, symbols = trial.vocabulary.separator, trial.vocabulary.vocab
    prompt = separator.join(symbols[2:6])

    def write(**settings):
        torch.rand(3)  # whatever ran before
        return "".join(trial.write(prompt, 30, temperature=temperature, **settings))

    assert write() == write(seed=0)
    assert (write(seed=1) != write()) == (temperature > 0)
    assert write().startswith(prompt + separator)
    written = write().split() if separator else list(write())
    assert len(written) == 4 + 30
    begun, *drawn = trial.write(None, 3)
    assert begun == symbols[0]
    assert len(drawn) == 3
    assert all(symbol.startswith(separator) for symbol in drawn)
