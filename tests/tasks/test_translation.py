"""Translation: encoding, loss and metrics, and a phrase book that is memorised."""

import shutil
import unicodedata
from html import unescape
from pathlib import Path

import lightning as L
import pytest
import torch

from kvt.data.tokens import UNK
from kvt.models.generation import greedy
from kvt.system import UserError
from kvt.tasks.translation import BOS_ID, EOS_ID, SPECIALS, SentencePairs, TranslationTask, paper_bleu, unpadded

PHRASES = [
    ("A man sleeps.", "Ein Mann schläft."),
    ("A woman sleeps.", "Eine Frau schläft."),
    ("The dog doesn't bark.", "Der Hund bellt nicht."),
    ("The dog barks.", "Der Hund bellt."),
    ("The cat sees the dog.", "Die Katze sieht den Hund."),
    ("The dog sees the cat.", "Der Hund sieht die Katze."),
    ("Is it cold?", "Ist es kalt?"),
    ("No, it's warm!", "Nein, es ist warm!"),
    ("A child (in red) plays.", "Ein Kind (in Rot) spielt."),
    ('The sign says "stop".', 'Auf dem Schild steht "Halt".'),
    ("Two men are standing in the snow.", "Zwei Männer stehen im Schnee."),
    ("A well-known man sings.", "Ein bekannter Mann singt."),
    ("The woman, who sings, is old.", "Die Frau, die singt, ist alt."),
    ("Why?", "Warum?"),
    ("The child's ball is red; it's new.", "Der Ball des Kindes ist rot; er ist neu."),
    ("Three old women drink hot tea in a small, dark room.", "Drei alte Frauen trinken heißen Tee in einem Raum."),
    ("The old man sees two cats.", "Der alte Mann sieht zwei Katzen."),
    ("It's snowing.", "Es schneit."),
    ("A boy in a blue shirt jumps.", "Ein Junge in einem blauen Hemd springt."),
    ("A girl in a red coat runs.", "Ein Mädchen in einem roten Mantel rennt."),
]
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The phrase book: all of it trains, a part validates, another tests."""
    root = tmp_path_factory.mktemp("phrases")
    for split, pairs in {"train": PHRASES, "val": PHRASES[::3], "test": PHRASES[5:9]}.items():
        for side, language in enumerate(("en", "de")):
            (root / f"{split}.{language}").write_text("\n".join(pair[side] for pair in pairs), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def data(root) -> SentencePairs:
    pairs = SentencePairs(source="en", target="de", root=str(root), batch_size=5, max_len=20)
    pairs.setup("fit")
    return pairs


def make(data, **settings) -> TranslationTask:
    torch.manual_seed(0)
    return TranslationTask(data.spec, **{"dim": 32, "heads": 4, "dropout": 0.0, **settings})


@pytest.fixture(scope="module", params=["kv+pos", pytest.param("kv", marks=pytest.mark.slow)])
def learned(data, request) -> TranslationTask:
    task = make(data, attn=request.param)
    optimizer, batch = torch.optim.Adam(task.parameters(), lr=5e-3), tuple(data.splits["train"])
    for _ in range(120):
        optimizer.zero_grad()
        task.compute_metrics((*batch, torch.arange(len(PHRASES))))["loss"].backward()
        optimizer.step()
    return task.eval()


@pytest.fixture
def fresh(data) -> TranslationTask:
    return make(data).eval()


# ---- sentences as numbers ------------------------------------------------------------------------


def test_a_sentence_is_its_words_between_two_ends(data):
    source, target = data.splits["train"]
    english, german = data.spec["source_vocab"], data.spec["target_vocab"]
    assert tuple(english[:4]) == tuple(german[:4]) == SPECIALS
    assert " ".join(english[number] for number in unpadded(source)[2]) == "<bos> The dog does n't bark . <eos>"
    assert " ".join(german[number] for number in unpadded(target)[2]) == "<bos> Der Hund bellt nicht . <eos>"
    assert not (source == SPECIALS.index(UNK)).any()
    assert {split: len(tensors[0]) for split, tensors in data.splits.items()} == {"train": 20, "val": 7, "test": 4}


@pytest.mark.parametrize("decomposed", [["test"], ["train", "val", "test"]], ids=["test", "all"])
def test_a_decomposed_umlaut_is_the_same_letter(root, data, tmp_path, decomposed):
    """As in files that tools of macOS write."""
    for path in shutil.copytree(root, tmp_path / "other").iterdir():
        form = "NFD" if path.stem in decomposed else "NFC"
        path.write_text(unicodedata.normalize(form, path.read_text(encoding="utf-8")), encoding="utf-8")
    other = SentencePairs(source="en", target="de", root=str(tmp_path / "other"), batch_size=5, max_len=20)
    other.setup("fit")
    assert (other.spec, other.content, other.texts) == (data.spec, data.content, data.texts)
    for split, tensors in data.splits.items():
        assert all(map(torch.equal, other.splits[split], tensors))


def test_a_model_understands_a_sentence_in_either_form(data):
    words = data.spec["target_vocab"]
    spec = {**data.spec, "source": "de", "target": "en", "source_vocab": words, "target_vocab": words}
    task = TranslationTask(spec, dim=32, heads=4, depth=1).eval()
    task._translate = lambda sources, *_: [words[1:-1] for words in sources]
    for form in ("NFC", "NFD"):
        assert task.translate([unicodedata.normalize(form, "Zwei Männer.")]) == ["Zwei Männer."]


def test_rare_words_are_unknown(root):
    rare = SentencePairs(source="en", target="de", root=str(root), min_freq=3, max_len=16)
    english = rare.spec["source_vocab"]
    assert "dog" in english
    assert "snow" not in english
    row = unpadded(rare.load()["train"][0])[10]
    assert " ".join(english[number] for number in row) == "<bos> <unk> <unk> <unk> <unk> in the <unk> . <eos>"


def spoiled(root: Path, folder: Path) -> Path:
    """The phrase book with lines beside the good ones that cannot be used: five pairs, of which one is empty twice."""
    for path in root.iterdir():
        lines, split = path.read_text().splitlines(), path.stem
        more = {"train.en": ["", "\u3000", "Fine."], "train.de": ["Gut.", "", "gut " * 19], "test.en": ["so " * 19]}
        more |= {"train": [], "val": ["\t"], "test": ["So."]}
        (folder / path.name).write_text("\n".join([*lines[:2], *more.get(path.name, more[split]), *lines[2:]]) + "\n")
    return folder


def test_without_them_the_corpus_is_that_of_the_others(root, data, tmp_path):
    settings = {"source": "en", "target": "de", "root": str(spoiled(root, tmp_path)), "max_len": 20}
    with pytest.raises(UserError, match=r"5 pairs cannot be used: .*/train.en, line 3 is empty: .*drop_pairs"):
        SentencePairs(**settings).setup("fit")
    left = SentencePairs(**settings, drop_pairs=True)
    left.setup("fit")
    assert left.texts == data.texts
    assert left.spec == data.spec
    assert left.content == data.content
    assert left.notes == {**data.notes, "dropped_pairs": "5 of 36 pairs: 3 of train, 1 of val, 1 of test"}


def test_a_result_tells_the_share_of_unknown_words(root, tmp_path):
    for path in shutil.copytree(root, tmp_path / "other").iterdir():
        path.write_text({"train": "A cat.\nA dog.", "val": "A cow.", "test": "Two of the cows."}[path.stem])
    data = SentencePairs(source="en", target="de", root=str(tmp_path / "other"), min_freq=2)
    data.setup("fit")
    shares = [
        f"{language} {split} {share}"
        for split, share in (("train", "33.33%"), ("val", "33.33%"), ("test", "80.00%"))
        for language in ("en", "de")
    ]
    assert data.notes == {"unknown_words": f"share of <unk>: {', '.join(shares)}"}


# ---- translations --------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
def test_a_phrase_book_is_memorised(learned, beam):
    english, german = map(list, zip(*PHRASES, strict=True))
    assert learned.translate(english, beam) == german


@pytest.mark.parametrize("beam", [1, 3])
def test_empty_sentences_have_empty_translations_and_unknown_words_have_some(learned, beam):
    assert learned.translate([], beam) == []
    assert learned.translate(["", " \t "], beam) == ["", ""]
    assert learned.translate(["", "Why?", "", "Is it cold?"], beam) == ["", "Warum?", "", "Ist es kalt?"]

    platypus, _ = learned.translate(["A platypus sleeps.", "Xyzzy plugh ☃ 𝄞"], beam)
    assert platypus.endswith(".")


def test_a_sentence_too_long_to_translate_is_named(learned):
    longest, longer = " ".join(["dog"] * 18), " ".join(["dog"] * 19)
    assert len(learned.translate([longest])) == 1
    with pytest.raises(UserError, match="sentence 2 has 19 words; this model reads at most 18"):
        learned.translate([longest, longer])


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_accumulated_batches_count_alike_however_many_words_they_have(root, count):
    """Also in the last step of an epoch, which has the batches that are left."""
    data = SentencePairs(source="en", target="de", root=str(root), batch_size=4, max_len=20)
    task, batches, sizes = make(data), [], []
    weight = task.model.generator.weight

    def gradient(batch):
        return torch.autograd.grad(task.compute_metrics(batch)["loss"], weight)[0]

    def measure(trainer, *rest):
        gradients = torch.stack([*map(gradient, batches)])
        torch.testing.assert_close(weight.grad, gradients.mean(0))
        words = torch.tensor([float(task.num_predictions(batch)) for batch in batches])
        if len(words) > 1:
            assert not torch.allclose(weight.grad, torch.tensordot(words / words.sum(), gradients, 1), rtol=0.01)
        sizes.append(len(batches))
        batches.clear()

    watch = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, task, batch, index: batches.append(batch), on_before_optimizer_step=measure
    )
    limits = {"max_epochs": 2, "limit_train_batches": 5, "limit_val_batches": 0, "enable_checkpointing": False}
    L.Trainer(**QUIET, **limits, callbacks=[watch], accumulate_grad_batches=count).fit(task, data)
    assert sizes == {2: [2, 2, 1] * 2, 3: [3, 2] * 2}[count]


# ---- what is reported ----------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["fresh", "learned"])
def test_the_papers_bleu_is_that_of_the_whole_split(data, fresh, learned, which):
    """The other metrics are computed by hand in tests/run/test_honest_results.py."""
    task = {"fresh": fresh, "learned": learned}[which]
    (reported,) = L.Trainer(**QUIET).test(task, data, verbose=False)
    task.eval()
    sources, targets = map(unpadded, data.splits["test"])
    decode, ends = task.target_vocabulary.decode, {"bos": BOS_ID, "eos": EOS_ID}
    written = [[BOS_ID, *greedy(task.model, torch.tensor([row]), **ends)[0], EOS_ID] for row in sources]
    paper = paper_bleu([decode(row) for row in written], [decode(row) for row in targets])
    assert reported["test/bleu_paper"] == pytest.approx(paper, rel=1e-5)
    assert (paper == pytest.approx(100)) == (which == "learned")
    english, german = map(list, zip(*data.texts["test"], strict=True))
    translations, table = task.translate(english), unescape(task.sample()).splitlines()
    assert table[2] == f"| {english[0]} | {german[0]} | {translations[0]} |"
    assert len(table) == 2 + len(english)


def test_predictions_are_translations_of_the_test_split_in_order(data, learned):
    batches = L.Trainer(**QUIET).predict(learned, data)
    found = [row for b in batches for row in zip(b["source"], b["reference"], b["translation"], strict=True)]
    assert found == [(source, target, target) for source, target in PHRASES[5:9]]


def test_sentences_in_other_ids_than_the_models_are_refused(root):
    """Of the same languages, with the vocabularies of another training split."""
    task = TranslationTask(SentencePairs("en", "de", root=str(root)).spec, dim=16, heads=2)
    others = SentencePairs("en", "de", root=str(root), min_freq=2)
    with pytest.raises(UserError, match="made with another source_vocab than the data"):
        L.Trainer(**QUIET).validate(task, others, verbose=False)
