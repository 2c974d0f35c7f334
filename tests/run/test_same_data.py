"""A checkpoint's data may lie elsewhere; other data are refused, or a command says that they are others."""

import json
import shutil
from pathlib import Path

import pytest

from kvt.commands import execute, run_words
from kvt.system import run
from kvt.tasks import Characters, Images, SentencePairs, SetAnomalies
from tests.conftest import QUIET, SMALL, SMALL_IMAGES, TINY, slow, write_features, write_images, write_sentences
from tests.data.helpers import user_error


def content(data):
    data.prepare_data()
    data.setup("fit")
    return data.hparams.get("content")


def words(command, *flags):
    run(lambda: run_words([command, *flags, *QUIET[: 2 if "--resume" in flags else None]]))


def maps(*flags):
    run(lambda: execute("maps", flags))


def images(folder):
    write_images(folder, classes=3, size=28, mode="L", train=12, test=4)
    return ["mnist", *SMALL_IMAGES, "--root", str(folder)], "--root"


def features(folder):
    write_features(folder / "mine.pt", classes=4, width=8, train=30, test=11)
    return ["anomaly", *TINY, "--max_epochs=1", "--set_size=4", "--features", str(folder / "mine.pt")], "--features"


def text(folder):
    folder.mkdir()
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 12)
    return ["characters", *SMALL["characters"], "--text", str(folder / "text.txt")], "--text"


def sentences(folder):
    write_sentences(folder, {"train": 22, "val": 6, "test": 5})
    return ["translation", *SMALL["translation"], "--root", str(folder)], "--root"


def change_images(folder):
    first, second = (folder / "train" / "class0" / f"{n}.png" for n in (0, 1))
    pixels = first.read_bytes(), second.read_bytes()
    first.write_bytes(pixels[1])
    second.write_bytes(pixels[0])


def change_features(folder):
    write_features(folder / "mine.pt", classes=4, width=8, train=30, test=11, seed=1)


def change_text(folder):
    path = folder / "text.txt"
    path.write_text(f"oT{path.read_text()[2:]}")


def change_sentences(folder):
    """Move the last pair of the training to the beginning of the validation."""
    for language in ("de", "en"):
        train, val = (folder / f"{split}.{language}" for split in ("train", "val"))
        *rest, last = train.read_text().splitlines(keepends=True)
        train.write_text("".join(rest))
        val.write_text(last + val.read_text())


@pytest.mark.parametrize(
    ("write", "change"),
    [(images, change_images), (text, change_text), *slow((sentences, change_sentences), (features, change_features))],
)
def test_data_may_move_but_not_change(experiment, mistake, in_tmp_dir, capsys, write, change):
    (config, *flags), place = write(here := in_tmp_dir / "here")
    *flags, path = flags
    folder = experiment(config, *flags, path)["path"].parent
    checkpoint, stored = str(folder / "checkpoints" / "last.ckpt"), json.loads((folder / "result.json").read_text())
    assert stored["content"]
    here.rename(there := in_tmp_dir / "there")
    moved = path.replace(str(here), str(there))

    (folder / "result.json").unlink()
    words("fit", "--resume", str(folder), place, moved)
    assert json.loads((folder / "result.json").read_text())["content"] == stored["content"]
    maps("--ckpt_path", checkpoint, place, moved)
    words("validate", "--ckpt_path", checkpoint, place, moved)
    words("predict", "--ckpt_path", checkpoint, place, moved)
    assert "not the data" not in capsys.readouterr().err

    change(there)
    (folder / "result.json").unlink()
    assert "other data" in mistake(lambda: words("fit", "--resume", str(folder), place, moved))
    assert "other data" in mistake(lambda: words("fit", "--ckpt_path", checkpoint, "--max_steps", "9", place, moved))
    if write is not text:
        assert "other data" in mistake(lambda: words("validate", "--ckpt_path", checkpoint, place, moved))
    assert "other data" in mistake(maps, "--ckpt_path", checkpoint, place, moved)
    words("predict", "--ckpt_path", checkpoint, place, moved)
    assert "not the data" in capsys.readouterr().err


def test_content_is_of_pixels_and_labels_wherever_they_lie(tmp_path):
    write_images(tmp_path / "one", classes=3, size=8, mode="L")
    shutil.copytree(tmp_path / "one", tmp_path / "two")  # with other times of modification
    (tmp_path / "two" / "train" / "class0" / "0.png").touch()
    both = [content(Images(root=str(tmp_path / name), mean=[0.5], std=[0.5])) for name in ("one", "two")]
    assert both[0] == both[1]
    (tmp_path / "two" / "test" / "class1" / "0.png").rename(tmp_path / "two" / "test" / "class2" / "9.png")
    assert content(Images(root=str(tmp_path / "two"), mean=[0.5], std=[0.5])) != both[0]


def test_content_of_features_is_that_of_their_images(in_tmp_dir, monkeypatch):
    write_images(in_tmp_dir / "photos", classes=3, size=8, mode="L")
    settings = {"root": str(in_tmp_dir / "photos"), "set_size": 4, "data_dir": str(in_tmp_dir)}

    def of_photos(backbone):
        data = SetAnomalies(backbone=backbone, **settings)
        write_features(data.source.cache, classes=3, width=data.source.feature_dim)
        return content(data)

    before = of_photos("resnet18")
    assert of_photos("resnet18") == before != of_photos("resnet34")
    change_images(in_tmp_dir / "photos")
    assert of_photos("resnet18") != before


@pytest.mark.parametrize("kind", [Characters, SentencePairs])
def test_nothing_is_downloaded_before_data_are_prepared(tmp_path, offline, kind):
    data = kind(data_dir=str(tmp_path))
    assert "no network" in user_error(data.prepare_data)
    assert [*Path(tmp_path).rglob("*.part")] == []
