"""Data sets of Hugging Face: the same numbers as from a folder or a file, or one line that says what is wrong."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvt.data.hub import HubCorpus
from kvt.data.images import DecodedImages, open_images
from kvt.tasks import Characters, Images, TextTokens
from tests.conftest import write_images
from tests.data.helpers import user_error

datasets = pytest.importorskip("datasets")

IMAGE = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "cat"])}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, tmp_path_factory, monkeypatch) -> None:
    """With a cache of its own, too, and no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save(root: str, features: dict | None = None, **splits: dict[str, list]) -> str:
    """Save a data set with the library; return its name."""
    columns = datasets.Features(features) if features else None
    made = {split: datasets.Dataset.from_dict(rows, columns) for split, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(root)
    return f"hf:{root}"


def pictures() -> dict[str, list]:
    levels = np.random.default_rng(0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    return {"image": [Image.fromarray(pixels) for pixels in levels], "label": [0, 1, 0, 1]}


def source(root: str) -> DecodedImages:
    return open_images("cifar10", Path("data"), Path(root))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", ["shards", "saved", "./pets"])
def test_a_set_made_from_a_folder_gives_the_tensors_of_the_folder(name, mode):
    write_images(Path("pets"), 2, 6, mode)
    shutil.copytree("pets/test", "pets/val")
    found = datasets.load_dataset("pets")
    found.save_to_disk("saved")
    for split, rows in found.items():
        rows.to_parquet(f"shards/{split}-0.parquet")
    folder, made = Images(root="pets", data_dir="data"), Images(root=f"hf:{name}", data_dir="data")
    assert made.spec == folder.spec  # classes, shape, mean and deviation
    for data in (folder, made):
        data.prepare_data()
        data.setup("fit")
    assert made.splits.keys() == folder.splits.keys() == {"train", "val", "test"}
    for split, tensors in folder.splits.items():
        assert all(map(torch.equal, made.splits[split], tensors))
    assert made.content == folder.content
    assert made.names("test") is None


def test_a_set_is_decoded_once_and_again_when_it_has_changed():
    name = save("pets", IMAGE, train=pictures(), test=pictures())
    source(name).prepare()
    [cached] = Path("data/.cache").glob("*.pt")
    made, before = cached.stat().st_mtime_ns, source(name).content
    source(name).prepare()
    assert cached.stat().st_mtime_ns == made
    shutil.rmtree("pets")
    save("pets", IMAGE, train=pictures() | {"image": [Image.new("RGB", (6, 6), "white")] * 4}, test=pictures())
    assert (source(name).load("train")[0] == 255).all()
    assert source(name).content != before


def texts(name: str) -> dict[str, list[str]]:
    return {split: [*documents] for split, documents in HubCorpus(name).splits().items()}


def without_labels() -> str:
    rows = {"image": pictures()["image"]}
    return save("pets", {"image": IMAGE["image"]}, train=rows, test=rows)


MISTAKES = {
    "no test": (lambda: source(save("pets", IMAGE, train=pictures())), "hf:pets"),
    "no classes": (lambda: source(without_labels()), "ClassLabel"),
    "two columns of texts": (lambda: texts(save("tale", train={"title": ["a"], "text": ["b"]})), "hf:tale"),
    "offline": (lambda: texts("hf:owner/tale"), "hf:owner/tale"),
    "no folder": (lambda: texts("hf:./nowhere"), "hf:./nowhere"),
    "a flag for files": (lambda: TextTokens(text="hf:tale", separator="\n"), "separator"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_set(mistake):
    read, named = MISTAKES[mistake]
    assert named in user_error(read)


def test_documents_are_the_rows_of_the_column_of_strings():
    rows = {"words": ["a", "", None, "\ufeffb\r\nc", "d\n"]}
    name = save("tale", train=rows, validation={"words": ["e"]}, test={"words": [""]})
    assert texts(name) == {"train": ["a", "", "b\nc", "d\n"], "val": ["e"]}
    assert Characters(name, length=8).parts == ("a\n\nb\nc\nd", "e")
    Path("lines").mkdir()
    Path("lines/train.txt").write_text("To be,\n\nor not to be\n")
    assert texts("hf:lines") == {"train": ["To be,", "", "or not to be"]}
    cut = Characters("hf:lines", length=8, val_size=0.5)
    assert cut.parts == ("To be,\n\nor", " not to be")
    assert cut.task_name == "characters_lines"


def test_a_language_model_has_each_row_as_a_document():
    rows = ["To be,", None, "", "or not\r\nto be.", "That is the question.\n"] * 3
    own = save("own", train={"text": rows}, validation={"text": ["Whether 'tis", "nobler"]})
    cut = save("cut", train={"text": rows})
    train = "To be,\0or not\nto be.\0That is the question.\n\0" * 3
    for name, text in ((own, train + "Whether 'tis\0nobler\0"), (cut, train)):
        data = TextTokens(text=name, data_dir="data", length=8, val_size=0.3)
        data.setup("fit")
        stream, first = data.splits["val"][2].tolist(), int(data.splits["val"][0][0])
        assert bytes(0 if i == 256 else i for i in stream).decode() == text
        assert first == len(train) if name == own else stream[first - 1] == 256
    assert data.task_name == "language_model_cut"
    assert TextTokens(text=own, data_dir="data", tokenizer="bpe", vocab_size=300).spec["tokenizer"] != "bytes"
