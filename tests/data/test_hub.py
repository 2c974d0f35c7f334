"""Data sets of Hugging Face: the same numbers as from a folder or a file, or one line that says what is wrong."""

import io
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import yaml
from PIL import Image

from kvt.cli.lightning_cli import run_words
from kvt.data.hub import list_images, read_texts
from kvt.data.images import DecodedSource, open_images
from kvt.system.console import run
from kvt.tasks import Characters, Images, SentencePairs, TextTokens
from tests.conftest import REPOSITORY, SMALL_IMAGES, write_images, write_sentences
from tests.data.helpers import user_error
from tests.data.test_image_folder import write
from tests.helpers.hostile import no_longer_than

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")
embed_table_storage = pytest.importorskip("datasets.table").embed_table_storage

SIZE = 20
IMAGE = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "cat"])}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, tmp_path_factory, monkeypatch) -> None:
    """With a cache of its own, too, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def source(root: str, image_size: int | None = None) -> DecodedSource:
    return open_images("cifar10", Path("data"), Path(root), image_size)


def photographs(root: Path, mode: str) -> None:
    """Images of different sizes, in three formats, one of which was taken with the camera turned."""
    for split in ("train", "val", "test"):
        for label, name in enumerate(("ant", "cat")):
            for i, ending in enumerate(("bmp", "png", "png", "png")):
                write(root / split / name / f"{i}.{ending}", mode, (SIZE + i, SIZE + label), seed=10 * label + i)
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(5).integers(0, 256, (30, SIZE, 3)[: 3 if mode == "RGB" else 2], dtype=np.uint8)
    Image.fromarray(pixels).save(root / "train/cat/4.jpg", exif=exif)


def as_parquet(root: str) -> str:
    for split, rows in datasets.load_dataset(root).items():
        whole = rows.with_format("arrow").map(embed_table_storage, batched=True)  # it would name their files
        whole.to_parquet(f"shards/{split}-0.parquet")
    return "hf:shards"


def saved(root: str) -> str:
    datasets.load_dataset(root).save_to_disk("saved")
    return f"hf:{Path('saved').absolute()}"


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", [as_parquet, saved, lambda root: f"hf:./{root}"], ids=["parquet", "saved", "folder"])
def test_a_set_made_from_a_folder_gives_the_tensors_of_the_folder(name, mode):
    photographs(Path("pets"), mode)
    settings = {"image_size": 8, "data_dir": "data"}
    folder, made = Images(root="pets", **settings), Images(root=name("pets"), **settings)
    assert made.spec == folder.spec  # classes, shape, mean and deviation
    for data in (folder, made):
        data.prepare_data()
        data.setup("fit")
    assert made.splits.keys() == folder.splits.keys() == {"train", "val", "test"}
    for split, tensors in folder.splits.items():
        assert all(map(torch.equal, made.splits[split], tensors))
    assert made.content == folder.content
    assert made.names("test") is None


def write_set(root: str, features: dict[str, object] | None = None, **splits: dict[str, list]) -> str:
    """Save a data set; the columns of its images and labels are filled in, where there are none."""
    columns = datasets.Features(features or IMAGE)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    usual = {"image": [Image.fromarray(image) for image in pixels], "label": [0, 1, 0, 1]}
    made = {
        split: datasets.Dataset.from_dict({name: (usual | given).get(name, [1] * 4) for name in columns}, columns)
        for split, given in (splits or {"train": {}, "test": {}}).items()
    }
    datasets.DatasetDict(made).save_to_disk(root)
    return f"hf:{root}"


@pytest.mark.parametrize("split", ["validation", "valid", "val", "dev", "Valid"])
def test_a_validation_split_is_that_of_the_set(split):
    first = Image.new("RGB", (6, 6), (1, 2, 3))
    data = Images(root=write_set("pets", train={}, test={}, **{split: {"image": [first] * 4}}))
    data.prepare_data()
    data.setup("fit")
    assert [len(labels) for _, labels in data.splits.values()] == [4, 4, 4]
    assert torch.equal(data.splits["val"][0][3, :, 0, 0], torch.tensor([1, 2, 3], dtype=torch.uint8))


def test_without_one_it_is_drawn_from_the_training_images():
    data = Images(root=write_set("pets"), val_size=0.25)
    data.prepare_data()
    data.setup("fit")
    assert {split: len(labels) for split, (_, labels) in data.splits.items()} == {"train": 3, "val": 1, "test": 4}


@pytest.mark.parametrize("make", [write_set, lambda root: write_images(Path(root), 2, 6, "RGB") or f"hf:{root}"])
def test_a_set_is_decoded_once_and_again_when_it_has_changed(make, monkeypatch):
    name = make("pets")
    source(name).prepare()
    [cached] = Path("data/.cache").glob("*.pt")
    made = cached.stat().st_mtime_ns
    source(name).prepare()
    assert cached.stat().st_mtime_ns == made
    before = source(name).content
    white = Image.new("RGB", (6, 6), "white")
    if make is write_set:
        shutil.rmtree("pets")
        write_set("pets", train={"image": [white] * 4}, test={})
    else:
        white.save("pets/train/class0/0.png")
    images, _ = source(name).load("train")
    assert (images[0] == 255).all()
    assert source(name).content != before


def png(cut: float) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(file, "png")
    return file.getvalue()[: int(cut * file.tell())]


STRINGS = {"image": datasets.Image(), "title": datasets.Value("string")}
BROKEN = [{"bytes": png(cut)} for cut in (1, 0.7, 1, 1)]
SMALLER = [Image.new("RGB", size) for size in ((6, 6), (6, 6), (6, 6), (6, 5))]
# name: (how the set is made, words of the message)
MISTAKES: dict[str, tuple[Callable[[], str], list[str]]] = {
    "no test": (lambda: write_set("pets", train={}), ["hf:pets has splits train, but no split test"]),
    "no classes": (
        lambda: write_set("pets", STRINGS, train={"title": [*"abcd"]}, test={"title": [*"abcd"]}),
        ["hf:pets has columns image (Image), title (Value): choose the label with hf:pets#label=COLUMN"],
    ),
    "no such column": (
        lambda: write_set("pets") + "#label=lable",
        ["unknown column of type label 'lable'", "mean 'label'"],
    ),
    "a column of another type": (
        lambda: write_set("pets") + "#image=label",
        ["column of type image 'label': choose from image"],
    ),
    "a class without a name": (
        lambda: broken_label("pets"),
        ["hf:pets test[3] has no class"],
    ),
    "no such role": (lambda: write_set("pets") + "#class=label", ["unknown choice 'class'", "image, label, text"]),
    "a class of test alone": (
        lambda: write_set("pets", STRINGS, train={"title": [*"abab"]}, test={"title": [*"abca"]}) + "#label=title",
        ["hf:pets#label=title test[2] has the class c, but train has no image of this class"],
    ),
    "two files that number classes for themselves": (
        lambda: numbered("pets", more=["bird", "cat"] * 2, train=["cat", "dog"] * 2),
        ["hf:pets: train-5.parquet and train-4.parquet number their classes differently"],
    ),
    "no images": (lambda: write_set("pets", {"label": IMAGE["label"]}), ["hf:pets has columns label (ClassLabel):"]),
    "no label": (lambda: write_set("pets", train={}, test={"label": [0, -1, 0, 0]}), ["hf:pets test[1] has no class"]),
    "no image": (
        lambda: write_set("pets", train={"image": [None] * 4}, test={}),
        ["train[0]", "the image is missing"],
    ),
    "cut": (lambda: write_set("pets", train={"image": BROKEN}, test={}), ["hf:pets train[1] is not a readable image"]),
    "size": (lambda: write_set("pets", train={"image": SMALLER}, test={}), ["hf:pets train[3] is 6x5", "--image_size"]),
    "configuration": (lambda: f"{write_set('pets')}:large", ["hf:pets:large cannot be loaded", "check the name"]),
    "missing": (lambda: "hf:./nowhere/pets", ["hf:./nowhere/pets: no such folder"]),
    "offline": (lambda: "hf:zalando-datasets/fashion_mnist", ["cannot be loaded", "check the name and the network"]),
    "no name": (lambda: "hf:", ["hf: names no data set", "hf:FOLDER"]),
    "format": (lambda: "hf:text", ["hf:text", "is the name of a file format", "hf:FOLDER"]),
    "empty folder": (lambda: Path("bare").mkdir() or "hf:bare", ["/bare doesn't contain any data files"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_set(mistake):
    make, words = MISTAKES[mistake]
    name = make()
    message = user_error(lambda: source(name).prepare())
    assert message.startswith(name)
    assert all(word in message for word in words)
    assert not [*Path().glob("data/.cache/*.pt")]


def numbered(root: str, **files: list[str]) -> str:
    """Parquet files of train and test, each of which numbers its classes for itself."""
    Path(root).mkdir()
    for name, classes in files.items():
        names = sorted({*classes})
        features = datasets.Features(IMAGE | {"label": datasets.ClassLabel(names=names)})
        rows = {"image": [Image.new("L", (6, 6))] * 4, "label": [names.index(one) for one in classes]}
        split = "test" if name == "test" else "train"
        datasets.Dataset.from_dict(rows, features).to_parquet(f"{root}/{split}-{len(name)}.parquet")
    return f"hf:{root}"


def broken_label(root: str) -> str:
    """Parquet files with a label that is beyond the names."""
    Path(root).mkdir()
    for split, last in (("train", 1), ("test", 2)):
        rows = {"image": [Image.new("L", (6, 6))] * 4, "label": [0, 1, 0, 1]}
        table = datasets.Dataset.from_dict(rows, datasets.Features(IMAGE)).data.table
        parquet.write_table(table.set_column(1, table.field("label"), [[0, 1, 0, last]]), f"{root}/{split}.parquet")
    return f"hf:{root}"


def encoded(root: str, **splits: list[str]) -> str:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    made = {
        split: datasets.Dataset.from_dict({"image": [Image.new("L", (6, 6))] * 4, "label": classes}, features)
        for split, classes in splits.items()
    }
    datasets.DatasetDict(made).class_encode_column("label").save_to_disk(root)
    return f"hf:{root}"


@pytest.mark.parametrize("make", [numbered, encoded])
def test_a_split_that_numbers_classes_for_itself_has_those_of_train(make):
    found = list_images(make("pets", train=["bird", "cat", "dog", "cat"], test=["cat", "dog", "dog", "cat"]))
    assert found.classes == ["bird", "cat", "dog"]
    assert [file.label for file in found.splits["train"]] == [0, 1, 2, 1]
    assert [file.label for file in found.splits["test"]] == [1, 2, 2, 1]


TWO = {"img": datasets.Image(), "photo": datasets.Image(), "fine": datasets.ClassLabel(names=["a", "b", "c"])}
TWO |= {"coarse": datasets.ClassLabel(names=["d", "e"]), "year": datasets.Value("int64"), "artist": STRINGS["title"]}
LABELS = {"fine": [2, 1, 0, 1], "coarse": [0, 1, 1, 0], "year": [1950, 900, 900, 1950], "artist": ["B", "A", "C", "A"]}


@pytest.mark.parametrize(
    ("chosen", "classes", "labels"),
    [
        ("", ["a", "b", "c"], [2, 1, 0, 1]),
        ("#label=coarse", ["d", "e"], [0, 1, 1, 0]),
        ("#label=year,image=photo", ["900", "1950"], [1, 0, 0, 1]),
        ("#image=img,label=artist", ["A", "B", "C"], [1, 0, 2, 0]),
    ],
)
def test_columns_are_chosen_and_others_named(chosen, classes, labels, capfd):
    black, white = (Image.new("L", (6, 6), colour) for colour in ("black", "white"))
    rows = LABELS | {"img": [black] * 4, "photo": [white] * 4}
    name = write_set("pets", TWO, train=rows, test=rows)
    found = source(f"{name}{chosen}")
    found.prepare()
    images, numbers = found.load("train")
    assert (found.classes, numbers.tolist(), found.name) == (classes, labels, "pets")
    assert (images == (255 if "photo" in chosen else 0)).all()
    said = capfd.readouterr().err
    assert ("label is fine; choose coarse with #label=COLUMN" in said) is (not chosen)
    assert ("image is img; choose photo with #image=COLUMN" in said) is ("image" not in chosen)


def test_without_the_library_the_extra_is_named(mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for read in (lambda: source("hf:pets"), lambda: read_texts("hf:pets")):
        assert mistake(lambda read=read: run(read)).endswith('a package is missing: pip install "kvt[datasets]"')


# ---- a folder is a folder ------------------------------------------------------------------------


def test_a_file_that_changed_but_not_its_time_is_read_again():
    """As after cp -p, rsync or from an archive; the content of a run is that of what it is trained on."""
    Path("tale").mkdir()
    path = Path("tale/train.txt")
    found = []
    for text in ("To be, or not to be.\n" * 20, "To eat or not to eat\n" * 20):
        path.write_text(text[:420])
        os.utime(path, (10**9, 10**9))
        data = Characters("hf:./tale", length=8)
        data.setup("fit")
        found.append(("".join(data.parts) + "\n", data.content))
        assert found[-1][0] == path.read_text()
    assert found[0][1] != found[1][1]


def test_an_image_that_changed_but_not_its_time_is_decoded_again():
    write_images(Path("pets"), classes=2, size=6, mode="RGB")
    path = Path("pets/train/class0/0.bmp")
    contents = []
    for level in (0, 255):
        Image.new("RGB", (6, 6), (level,) * 3).save(path)
        os.utime(path, (10**9, 10**9))
        found = source("hf:./pets")
        found.prepare()
        contents.append(found.content)
        images, _ = found.load("train")
        assert any((image == level).all() for image in images)
    assert contents[0] != contents[1]


CARDS = [
    "http://127.0.0.1:{port}/train.txt",
    "hf://datasets/owner/tale/train.txt",
    "../outside/train.txt",
    "{outside}/train.txt",
]


@pytest.mark.parametrize("named", CARDS)
@pytest.mark.parametrize("offline", [True, False])
def test_a_readme_makes_no_request_and_leads_nowhere(named, offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", offline)
    for folder, text in (("tale", "inside"), ("outside", "outside")):
        Path(folder).mkdir()
        Path(folder, "train.txt").write_text(text)
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        files = named.format(port=server.getsockname()[1], outside=Path("outside").absolute())
        head = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]})
        Path("tale/README.md").write_text(f"---\n{head}---\n")
        monkeypatch.setattr(socket.socket, "connect", lambda _, address: requests.append(address))
        assert read_texts("hf:./tale") == {"train": "inside"}
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not requests


@pytest.mark.parametrize("name", ["train.txt", "train.parquet"])
def test_a_fifo_in_a_folder_is_refused_and_not_waited_for(name):
    Path("set").mkdir()
    os.mkfifo(f"set/{name}")
    with no_longer_than(60):
        assert f"set/{name}" in user_error(lambda: read_texts("hf:set"))


def test_an_image_is_not_read_from_outside_the_folder():
    Image.new("RGB", (6, 6)).save("secret.png")
    Path("pets").mkdir()
    for place in (Path("secret.png").absolute(), Path("pets/../secret.png").absolute(), "secret.png"):
        images = [{"path": str(place), "bytes": None}] * 4
        table = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, datasets.Features(IMAGE))
        for split in ("train", "test"):
            parquet.write_table(table.data.table, f"pets/{split}.parquet")
        message = user_error(lambda: source("hf:./pets").prepare())
        assert message.startswith("hf:./pets train[0] ")
        assert "outside the data set" in message
    Image.new("RGB", (6, 6)).save("pets/own.png")
    images = [{"path": str(Path("pets/own.png").absolute()), "bytes": None}] * 4
    table = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 0, 1]}, datasets.Features(IMAGE))
    for split in ("train", "test"):
        parquet.write_table(table.data.table, f"pets/{split}.parquet")
    source("hf:./pets").prepare()


def test_a_saved_set_names_no_file_outside_the_folder():
    name, other = (write_documents(root, train={"text": [root]}) for root in ("tale", "outside"))
    (secret,) = Path("outside/train").glob("*.arrow")
    state = Path("tale/train/state.json")
    for place in (f"../../outside/train/{secret.name}", str(secret.absolute())):
        state.write_text(json.dumps(json.loads(state.read_text()) | {"_data_files": [{"filename": place}]}))
        assert user_error(lambda: read_texts(name)).startswith("hf:tale")
    assert read_texts(other) == {"train": "outside"}


def test_a_file_whose_name_is_a_pattern_is_read():
    Path("ta*le").mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet("ta*le/train-[0].parquet")
    assert read_texts("hf:./ta*le") == {"train": "a"}


# ---- texts ---------------------------------------------------------------------------------------


def write_documents(root: str, **splits: dict[str, list]) -> str:
    datasets.DatasetDict({name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()}).save_to_disk(root)
    return f"hf:{root}"


def test_a_text_file_is_the_same_by_either_name():
    text = "To be,\n\nor not to be:\n" * 20
    Path("tale").mkdir()
    Path("tale/train.txt").write_text(text)
    by_name, file = Characters("hf:tale", length=8), Characters("tale/train.txt", length=8)
    assert "".join(by_name.parts) + "\n" == "".join(file.parts) == text
    assert by_name.spec == file.spec
    assert by_name.content == file.content
    assert by_name.task_name == "characters_tale"


def test_documents_are_joined_by_line_ends_and_those_that_are_none_left_out():
    assert read_texts(write_documents("tale", train={"words": ["a", "", None, "b\nc"]})) == {"train": "a\n\nb\nc"}


def test_rows_that_are_lines_are_joined_as_the_text_has_them():
    """As those of WikiText, whose rows end with their line end, or are empty for an empty line."""
    text = "\n = Title = \n\n The text . \n" * 3
    rows = [line if line.strip() else "" for line in text.splitlines(keepends=True)]
    assert read_texts(write_documents("tale", train={"text": rows})) == {"train": text}
    assert read_texts(write_documents("fable", train={"text": ["\ufeffa\r\n", "b"]})) == {"train": "a\nb"}


def test_a_word_that_other_csv_means_as_missing_is_a_word():
    Path("tale").mkdir()
    Path("tale/train.csv").write_text('text\nNA\nnull\n""\nNone\nnan\n')
    assert read_texts("hf:tale") == {"train": "NA\nnull\nNone\nnan"}


def test_of_several_columns_of_strings_the_text_is_taken():
    columns = {"title": ["T"], "text": ["a tale"], "pages": [3]}
    assert read_texts(write_documents("tale", train=columns)) == {"train": "a tale"}
    del columns["text"]
    message = user_error(lambda: read_texts(write_documents("fable", train=columns | {"author": ["A"]})))
    assert message.startswith("hf:fable has columns title (Value), pages (Value), author (Value): choose the text")
    assert read_texts("hf:fable#text=author") == {"train": "A"}
    assert user_error(lambda: read_texts(write_documents("sums", train={"n": [1]}))).startswith("hf:sums has columns n")


def test_a_text_is_validated_on_its_own_split_else_on_its_end():
    train, val = "abc" * 20, "dcba" * 5
    own = Characters(write_documents("own", train={"text": [train]}, validation={"text": [val]}), length=8)
    assert own.parts == (train, val)
    cut = Characters(write_documents("cut", train={"text": [train]}, test={"text": [val]}), length=8, val_size=0.25)
    assert cut.parts == (train[:45], train[45:])


def tokens(name: str, **settings) -> tuple[TextTokens, dict[str, str]]:
    """A data set as bytes, and the text of each split, in which \0 stands where a document ends."""
    data = TextTokens(text=name, data_dir="data", length=8, **settings)
    data.setup("fit")
    stream = data.splits["val"][2].tolist()
    cut = int(data.splits["val"][0][0])
    parts = {"train": stream[:cut], "val": stream[cut:]}
    return data, {split: bytes(0 if i == 256 else i for i in part).decode() for split, part in parts.items()}


@pytest.mark.parametrize("piece", [2**23, 40])
def test_a_language_model_has_each_row_as_a_document(piece, monkeypatch):
    monkeypatch.setattr("kvt.data.hub.PIECE", piece)
    rows = ["To be,", None, "", "or not\r\nto be.", "That is the question.\n"] * 3
    own = write_documents("own", train={"text": rows}, validation={"text": ["Whether 'tis", "nobler"]})
    train = "To be,\0or not\nto be.\0That is the question.\n\0" * 3
    data, parts = tokens(own)
    assert parts == {"train": train, "val": "Whether 'tis\0nobler\0"}
    assert data.task_name == "language_model_own"
    _, parts = tokens(write_documents("cut", train={"text": rows}), val_size=0.3)
    assert parts["train"] + parts["val"] == train
    assert parts["train"].endswith("\0")
    again, _ = tokens(own)
    assert again.content == data.content
    files = TextTokens(text=own, data_dir="data", tokenizer="bpe", vocab_size=300, length=8)
    assert files.spec["tokenizer"] != "bytes"


@pytest.mark.parametrize("piece", [2**23, 40])
def test_rows_that_are_lines_are_one_document_of_a_language_model(piece, monkeypatch):
    monkeypatch.setattr("kvt.data.hub.PIECE", piece)
    lines = ["", " = Title = \n", "", " The text . \n"] * 5
    text = "".join(line or "\n" for line in lines)
    name = write_documents("wiki", train={"text": lines}, validation={"text": lines[:3]})
    assert tokens(name)[1] == {"train": f"{text}\0", "val": "\n = Title = \n\n\0"}


def test_flags_for_files_are_refused_for_rows():
    assert "--separator" in user_error(lambda: TextTokens(text="hf:tale", separator="\n"))


@pytest.mark.parametrize("kind", ["columns", "translation"])
def test_a_parallel_corpus_is_that_of_the_files(kind, tmp_path):
    sizes = {"train": 22, "val": 6, "test": 5}
    write_sentences(Path("corpus"), sizes)
    made = {}
    for split in sizes:
        sides = {language: Path(f"corpus/{split}.{language}").read_text().splitlines() for language in ("de", "en")}
        rows = {**sides}
        if kind == "translation":
            pairs = [dict(zip(sides, pair, strict=True)) for pair in zip(*sides.values(), strict=True)]
            rows = {"id": [*range(len(pairs))], "translation": pairs}
        features = {"id": datasets.Value("int64"), "translation": datasets.Translation(["de", "en"])}
        made[{"val": "validation"}.get(split, split)] = datasets.Dataset.from_dict(
            rows, datasets.Features(features) if kind == "translation" else None
        )
    datasets.DatasetDict(made).save_to_disk("saved")
    files, hub = (SentencePairs(root=root) for root in ("corpus", "hf:saved"))
    assert hub.texts == files.texts
    assert hub.spec == files.spec
    message = user_error(lambda: SentencePairs(root="hf:saved", target="fr").setup("fit"))
    assert message.startswith("hf:saved has columns ")
    assert message.endswith("choose a data set with columns de and fr")


# ---- whole runs ----------------------------------------------------------------------------------


def test_a_run_on_images_and_what_it_predicts(experiment, kvt):
    write_images(Path("pets"), classes=3, size=28, mode="L")
    name = as_parquet("pets")
    result = experiment("mnist", *SMALL_IMAGES, "--root", name)
    assert result["path"].is_relative_to(Path("lightning_logs/shards").absolute())
    assert "test/acc" in result
    checkpoint = result["path"].parent / "checkpoints/best.ckpt"
    kvt("predict", "--ckpt_path", str(checkpoint), "--root", name)
    [predictions] = result["path"].parent.rglob("predictions.csv")
    assert len(predictions.read_text().splitlines()) == 1 + 12


def test_predictions_are_read_as_the_guide_says_whatever_the_classes_are_called(experiment, kvt):
    """pandas would make NA a missing value, and 01 a number."""
    write_images(Path("pets"), classes=2, size=28, mode="L")
    for split in ("train", "test"):
        for number, name in enumerate(("01", "NA")):
            Path(f"pets/{split}/class{number}").rename(f"pets/{split}/{name}")
    folder = experiment("mnist", *SMALL_IMAGES, "--root", "pets")["path"].parent
    kvt("predict", "--ckpt_path", str(folder / "checkpoints/best.ckpt"), "--root", "pets")
    (path,) = folder.rglob("predictions.csv")
    (call,) = re.findall(r"`(pandas\.read_csv\(.*?\))`", (REPOSITORY / "docs/guides/images.md").read_text())
    assert {*eval(call, {"pandas": pandas, "path": path})["target"]} == {"01", "NA"}


@pytest.mark.parametrize("name", ["hf:owner/tale", "hf:./broken"])
def test_a_mistake_leaves_nothing_and_ends_with_code_2(mistake, name):
    Path("broken").mkdir()
    Path("broken/train.parquet").write_text("?")
    words = ["fit", "--config", "characters", "--text", name]
    assert f"{name} cannot be loaded" in mistake(lambda: run(lambda: run_words(words)))
