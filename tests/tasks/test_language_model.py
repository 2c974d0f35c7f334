"""Tokens of texts of any size, and the language model that is trained on them."""

import json
import os
from itertools import compress
from math import log
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvt
from kvt.data import tokens as token_module
from kvt.data.texts import Corpus
from kvt.data.tokens import END, IGNORE, BytePairs, Bytes, TokenFile, document_starts, learn_pairs, read_tokenizer
from kvt.system import UserError
from kvt.tasks import LanguageModelTask, TextTokens
from tests.conftest import SMALL

POEM = "Über allen Gipfeln ist Ruh,\nin allen Wipfeln spürest du\nkaum einen Hauch 🌲.\n"
ANY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def folder(tmp_path: Path, *texts: str) -> Path:
    for number, text in enumerate(texts):
        (tmp_path / "poems").mkdir(exist_ok=True)
        (tmp_path / "poems" / f"{number}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "poems"


def token_file(corpus: Corpus, tmp_path: Path, tokens: Bytes | None = None) -> TokenFile:
    file = TokenFile(corpus, tokens or Bytes(), tmp_path / "cache")
    file.load()
    return file


def parts(tokens: Bytes, text: str) -> list[int]:
    return [int(i) for part in tokens.encode_parts(text) for i in part]


def model(spec, **own) -> LanguageModelTask:
    return LanguageModelTask(spec, dropout=0.0, **{"dim": 16, "depth": 2, "heads": 2, **own}).eval()


@pytest.fixture(scope="module")
def pairs() -> BytePairs:
    pytest.importorskip("tokenizers")
    return BytePairs(learn_pairs(iter([POEM] * 3), 280))


# ---- tokens --------------------------------------------------------------------------------------


@ANY
@given(text=st.text())
def test_tokens_are_the_text_and_have_its_bytes(text, pairs):
    for tokens in (Bytes(), pairs):
        ids = tokens.encode(text)
        assert tokens.text(ids) == text
        assert b"".join(tokens.pieces[i] for i in ids) == text.encode()
        assert parts(tokens, text) == ids
        assert tokens.end not in ids
    assert len(pairs.encode(text)) <= len(text.encode())
    assert pairs.text([pairs.end]) == ""


def test_an_end_token_is_added_to_a_tokenizer_that_lacks_it(in_tmp_dir):
    pytest.importorskip("tokenizers")
    Path("tokenizer.json").write_text(learn_pairs(iter([POEM]), 280).replace(END, "</s>"))
    added = read_tokenizer(Path("tokenizer.json"))
    assert (added.end, len(added.pieces)) == (280, 281)


LATER = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {  # how GPT-2 and its successors split a text
    "GPT-2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "later": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LATER}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}


@ANY
@given(text=st.text("ab1.,/' \n\u3000é。", max_size=200), rules=st.sampled_from([*RULES]), part=st.integers(1, 20))
def test_the_tokens_of_a_long_text_are_those_of_the_library(pairs, text, rules, part):
    """Which encodes it as a whole; byte pairs of white space and line ends are learned."""
    learned = json.loads(learn_pairs(iter(["a. \n\n\nb \n \n  /a\n/\n b.\n" * 9]), 400))
    tokens = BytePairs(json.dumps(learned | {"pre_tokenizer": RULES[rules]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_module, "PART", part)
        assert parts(tokens, text) == tokens.encode(text)


ADDED = [{"content": "        "}, {"content": "ß¡Ġ", "normalized": True}, {"content": "<|pad|>", "special": True}]
SAVED = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": END},
    },
}


def others(definition: str, added=(), model=None, **own) -> BytePairs:
    """Return byte pairs as another program might have saved them."""
    content = json.loads(definition)
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"] = [
        *({**found, **(own.pop("end", {}))} for found in content["added_tokens"]),
        *({"id": 280 + number, **token, **found} for number, found in enumerate(added)),
    ]
    return BytePairs(json.dumps(content | own | {"model": content["model"] | (model or {})}), "own.json")


@pytest.mark.parametrize(
    "own",
    [
        *(pytest.param({name: value}, id=name) for name, value in SAVED.items()),
        pytest.param({"added": ADDED}, id="added tokens"),
        pytest.param({"end": {"special": False}}, id="an end that is not special"),
        pytest.param({"model": {"dropout": 0.5}}, id="dropout"),
    ],
)
def test_whatever_a_tokenizer_was_saved_with_all_of_the_text_is_encoded(pairs, own):
    """Its bytes are those of the text, and markers in the text are text."""
    text = f"{POEM}def f():\n        return 'ß¡Ġ<|pad|>{END}{END}'\n{POEM}"
    tokens = others(pairs.definition, **own)
    ids = parts(tokens, text)
    assert tokens.text(ids) == text
    assert sum(len(tokens.pieces[i]) for i in ids) == len(text.encode())
    assert tokens.end not in ids
    assert ids == tokens.encode(text) == others(pairs.definition, **own).encode(text)
    assert any(i >= 280 for i in ids) == ("added" in own)


@pytest.mark.parametrize(
    "own", [{"normalizer": {"type": "Lowercase"}}, {"added": [{"content": "Ruh,", "rstrip": True}]}], ids=str
)
def test_a_tokenizer_that_changes_the_text_is_refused(pairs, tmp_path, own):
    tokens = others(pairs.definition, **own)
    with pytest.raises(UserError, match=r"--tokenizer own.json does not keep the text"):
        token_file(Corpus(folder(tmp_path, POEM)), tmp_path, tokens)


def test_a_marker_in_a_document_does_not_end_it(pairs, tmp_path):
    corpus = Corpus(folder(tmp_path, f"{END}{END}", f"a{END}b"))
    for tokens in (Bytes(), pairs):
        ids = token_file(corpus, tmp_path, tokens).load()
        assert len(document_starts(ids, tokens.end)) == 2
        assert {tokens.text(part.tolist()) for part in ids.tensor_split((ids == tokens.end).nonzero()[:, 0])} == {
            *(f"{END}{END}", f"a{END}b", "")
        }


# ---- files ---------------------------------------------------------------------------------------


@ANY
@given(
    texts=st.lists(
        st.lists(st.sampled_from([*"abé🌲|\n\n", "\r\n", "\r\n"]), min_size=1, max_size=40).map("".join),
        min_size=1,
        max_size=5,
    ),
    separator=st.sampled_from([None, "|", "||", "\n\n", "\n\n\n"]),
)
def test_a_token_file_has_each_document_and_an_end(texts, separator, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("any")
    corpus = Corpus(folder(tmp_path, *texts), separator=separator)
    texts = [text.replace("\r\n", "\n") for text in texts]
    whole = [part for text in texts for part in (text.split(separator) if separator else [text]) if part]
    if not whole:
        with pytest.raises(UserError, match="contains only separators"):
            token_file(corpus, tmp_path)
        return
    file = token_file(corpus, tmp_path)
    ids = file.load().tolist()
    found = "".join("\0" if i == 256 else chr(i) for i in ids).encode("latin1").decode().split("\0")
    assert sorted(found) == sorted([*whole, ""])
    starts = document_starts(file.load(), 256).tolist()
    assert starts == [0, *(place + 1 for place, i in enumerate(ids) if i == 256)][: len(starts)]
    assert len(starts) == len(whole)


def test_the_order_of_files_is_random_and_depends_on_their_names_alone(tmp_path):
    for name in ("here", "there"):
        for number in range(30):
            (tmp_path / name / f"{number:02}").mkdir(parents=True)
            (tmp_path / name / f"{number:02}" / "text.txt").write_text(f"{number:02}")
    here, there = (token_file(Corpus(tmp_path / name), tmp_path) for name in ("here", "there"))
    assert torch.equal(here.load(), there.load())
    assert here.content == there.content
    assert here.path != there.path
    order = Bytes().text(here.load().tolist())
    assert sorted(order[i : i + 2] for i in range(0, 60, 2)) == [f"{number:02}" for number in range(30)]
    assert order != "".join(f"{number:02}" for number in range(30))


# ---- windows -------------------------------------------------------------------------------------


def served(data: TextTokens, split: str) -> list[tuple[list[int], list[int], list[bool]]]:
    rows = data.make_batches(*data.splits[split], batch_size=3, seed=0)
    return [tuple(part.tolist() for part in row) for batch in rows for row in zip(*batch, strict=True)]


def made(tmp_path, **own) -> TextTokens:
    root = folder(tmp_path, *(POEM[start:] for start in range(0, 60, 7)))
    data = TextTokens(text=str(root), data_dir=str(tmp_path), **{"length": 16, "val_size": 0.2, "batch_size": 3} | own)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("length", [1, 7, 16, 150])
def test_each_token_of_a_split_but_the_first_is_predicted_once_and_counted_once(tmp_path, length):
    data = made(tmp_path, length=length)
    stream = data.splits["val"][2].tolist()
    cut = int(data.splits["val"][0][0])
    assert cut in document_starts(torch.tensor(stream), 256)
    task = model(data.spec)
    for split, part in (("train", stream[:cut]), ("val", stream[cut:])):
        rows = served(data, split)
        kept = [[list(compress(row, real)) for row in (inputs, targets)] for inputs, targets, real in rows]
        assert [token for inputs, _ in kept for token in inputs] == part[:-1]
        assert [token for _, targets in kept for token in targets] == part[1:]
        assert {len(row) for row, *_ in rows} == {length}
        assert all({*targets[sum(real) :]} <= {IGNORE} for _, targets, real in rows)
        batches = data.make_batches(*data.splits[split], batch_size=3, seed=0)
        assert sum(int(task.num_predictions(batch)) for batch in batches) == len(part) - 1


def test_with_a_val_size_of_1_the_whole_text_is_validated(tmp_path):
    data = made(tmp_path, val_size=1)
    assert data.splits.keys() == {"val"}
    kept = [token for _, targets, real in served(data, "val") for token in compress(targets, real)]
    assert kept == data.splits["val"][2].tolist()[1:]


def test_every_tokenizer_validates_on_the_same_documents(tmp_path, pairs):
    """Even where the text of one part is much shorter in its tokens."""
    root = folder(tmp_path, *(POEM * 2 if number % 3 else "0123456789" * 9 for number in range(30)))
    (tmp_path / "own.json").write_text(pairs.definition)
    parts = []
    for tokenizer in ("bytes", str(tmp_path / "own.json")):
        data = TextTokens(text=str(root), tokenizer=tokenizer, length=8, val_size=0.3, data_dir=str(tmp_path))
        data.setup("fit")
        cut, stream = int(data.splits["val"][0][0]), data.splits["val"][2].tolist()
        parts.append([data.tokens.text(part) for part in (stream[:cut], stream[cut:])])
    assert parts[0] == parts[1]
    train, val = (len(part.encode()) for part in parts[0])
    assert val / (train + val) == pytest.approx(0.3, abs=0.05)


@ANY
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 1), st.integers(8, 200))
def test_the_last_share_of_a_text_begins_where_its_bytes_do(ids, share, piece):
    pieces = [b"", b"a", b"bb", b"ccc", b"dddd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_module, "PIECE", piece)
        found = token_module.start_of_last(share, torch.tensor(ids, dtype=torch.int16), pieces)
    total = sum(ids)
    wanted = total - round(share * total)
    assert found == next(place for place in range(len(ids) + 1) if sum(ids[:place]) >= wanted)


def test_rows_of_documents_are_cut_or_filled_with_ends(tmp_path):
    data = made(tmp_path, loss_on="all", length=40)
    texts = [path.read_bytes() for path in data.corpus.files]
    rows = served(data, "train") + served(data, "val")
    assert len(rows) == len(texts)
    for text, (inputs, targets, real) in zip(texts, rows, strict=True):
        document = [*text, 256]
        whole = [*document[:41], *[256] * (41 - len(document))]
        assert [*inputs, targets[-1]] == whole
        assert targets == whole[1:]
        assert real == [place < len(document) for place in range(1, 41)]
    assert {len(text) < 40 for text in texts} == {True, False}


# ---- the model -----------------------------------------------------------------------------------


def test_an_untrained_model_knows_nothing(tmp_path):
    """Its loss is that of a uniform distribution: the weights are small."""
    data = made(tmp_path)
    torch.manual_seed(0)
    batch = next(iter(data.make_batches(*data.splits["train"], batch_size=8, seed=0)))
    task = LanguageModelTask(data.spec, dropout=0.0)
    assert task.compute_metrics(batch)["loss"].item() == pytest.approx(log(257), rel=0.01)


def test_it_writes_whole_characters():
    task = model({"tokenizer": "bytes", "length": 24})
    parts = list(task.write("Hü🌲", 30, temperature=5.0, seed=1))
    assert parts[0] == "Hü🌲"
    assert len(parts) == 31
    assert "".join(parts) == task.generate("Hü🌲", 30, temperature=5.0, seed=1)
    again = torch.tensor([[256, *"Hü🌲".encode()]])
    assert task.vocabulary.text(again[0].tolist()) == "Hü🌲"
    incremental = task.vocabulary.additions("é🌲!".encode())
    assert [*incremental] == ["", "é", "", "", "", "🌲", "!"]


def test_byte_pairs_are_learned_once_and_kept_in_the_checkpoint(experiment, pairs):
    words = [*SMALL["language_model"], "--tokenizer", "bpe", "--vocab_size", "300"]
    result = experiment("language_model", *words)
    task = kvt.load(result["path"].parent / "checkpoints" / "best.ckpt")
    assert task.vocabulary.text(task.vocabulary.encode(POEM)) == POEM
    assert len(task.vocabulary.pieces) == task.model.head.out_features == 300
    again = experiment("language_model", *words)
    assert again["val/loss"] == result["val/loss"]
    Path("own.json").write_text(task.vocabulary.definition)
    own = experiment("language_model", *SMALL["language_model"], "--tokenizer", "own.json")
    assert own["val/loss"] == result["val/loss"]


def test_a_text_that_changed_but_not_its_time_is_read_again_and_clutter_is_not(in_tmp_dir):
    """As `cp -p`, archives and rsync leave times; what editors keep adds nothing."""
    folder = in_tmp_dir / "texts"
    (folder / ".ipynb_checkpoints").mkdir(parents=True)
    text = folder / "a.txt"
    contents = []
    for letter in "ab":
        text.write_text(letter * 600)
        os.utime(text, (1, 1))
        data = TextTokens(text=str(folder), length=8, data_dir=str(in_tmp_dir))
        data.prepare_data()
        data.setup("fit")
        contents.append(data.content)
        tokens = {int(token) for inputs, *_ in data.train_dataloader() for token in inputs.flatten()}
        assert ord(letter) in tokens <= {ord(letter), data.tokens.end}
        (folder / ".ipynb_checkpoints" / "copy.txt").write_text("z" * 600)
    assert contents[0] != contents[1]
