"""Folders of images: the pixels that PIL reads, in the order of torchvision, or one line that names the culprit."""

import os
import re
import shutil
import time
import unicodedata
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torchvision import datasets

from kvt.data.image_files import list_folder
from kvt.data.images import DecodedSource
from tests.conftest import REPOSITORY, SMALL_IMAGES, write_images
from tests.data.helpers import cut, fork, run_twice_at_once, user_error


def write(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4), seed: int = 0) -> np.ndarray:
    """A random image of `size` (width, height) at `path`; returns its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def write_folder(root: Path, mode: str = "RGB") -> None:
    """A folder of 2 classes, 3 training and 1 test images each."""
    names = [f"train/{c}/{i}.png" for c in ("cat", "ant") for i in range(3)] + ["test/cat/0.png", "test/ant/0.png"]
    for i, name in enumerate(names):
        write(root / name, mode, seed=i)


@pytest.fixture
def pets(tmp_path) -> Path:
    write_folder(tmp_path / "pets")
    return tmp_path / "pets"


def source(root: Path) -> DecodedSource:
    return DecodedSource(list_folder(root), root.parent / "data")


def decoded(root: Path, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    found = source(root)
    found.prepare()
    return found.load(split)


def cache_files(root: Path, pattern: str = "*.pt") -> list[Path]:
    return sorted((root.parent / "data" / ".cache").glob(pattern))


def test_a_class_may_have_another_unicode_form_in_each_split(tmp_path):
    names = [f"train/{c}/{i}.png" for c in ("zebra", "kätzchen") for i in range(2)] + ["test/zebra/0.png"]
    for name in [*names, f"test/{unicodedata.normalize('NFD', 'kätzchen')}/0.png"]:
        write(tmp_path / "pets" / name)
    found = list_folder(tmp_path / "pets")
    assert (found.classes, found.left_out) == (["kätzchen", "zebra"], None)
    assert {split: [file.label for file in files] for split, files in found.splits.items()} == {
        "train": [0, 0, 1, 1],
        "test": [0, 1],
    }


# ---- what is read --------------------------------------------------------------------------------


def require_as_torchvisions_image_folder(root: Path, mode: str = "RGB") -> None:
    """The same pixels and labels, in the same order."""
    for split in ("train", "test"):
        images, labels = decoded(root, split)
        oracle = datasets.ImageFolder(root / split, loader=lambda path: np.atleast_3d(Image.open(path).convert(mode)))
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), np.stack([image for image, _ in oracle]))
        assert labels.tolist() == oracle.targets


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_formats_and_nested_folders_are_read_to_the_pixel(tmp_path, mode, channels):
    root = tmp_path / "pets"
    write_folder(root, mode)
    for i, name in enumerate(["a.bmp", "b.JPG", "sub/c.tiff", "sub-2/d.png"]):
        write(root / "train/ant" / name, mode, seed=20 + i)
    (root / "train/ant/notes.txt").write_text("no image")
    pets = source(root)
    assert (pets.name, pets.classes, pets.shape) == ("pets", ["ant", "cat"], (channels, 4, 5))
    require_as_torchvisions_image_folder(root, mode)
    assert len(decoded(root)[0]) == 10


def test_grey_images_in_a_colour_folder_become_rgb(pets):
    grey = write(pets / "train/cat/9.png", "L")
    assert np.array_equal(decoded(pets)[0][-1].numpy(), np.stack([grey] * 3))


def test_a_folder_is_coloured_if_any_image_is(tmp_path):
    write_folder(tmp_path / "pets", "L")
    assert source(tmp_path / "pets").shape == (1, 4, 5)
    write(tmp_path / "pets/test/cat/9.png", "RGB")
    assert source(tmp_path / "pets").shape == (3, 4, 5)
    assert decoded(tmp_path / "pets")[0].shape[1] == 3


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (33, 70), (8, 8), (5, 3)])
def test_the_centre_is_kept_and_the_shorter_side_becomes_image_size(pets, size):
    """A white square, half as wide as the shorter side, stays in the middle of a black picture."""
    picture = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    half = min(size) // 4
    rows, columns = (slice(side // 2 - half, side - side // 2 + half) for side in (size[1], size[0]))
    picture[rows, columns] = 255
    for path in pets.rglob("*.png"):
        Image.fromarray(picture).save(path)
    found = DecodedSource(list_folder(pets), pets.parent / "data", image_size=16)
    found.prepare()
    images, _ = found.load("train")
    assert images.shape[1:] == (3, 16, 16)
    light = images[0].double().mean(0)
    assert torch.allclose(light, light.flip(0), atol=3)
    assert torch.allclose(light, light.flip(1), atol=3)
    assert light.mean() / 255 == pytest.approx(
        (rows.stop - rows.start) * (columns.stop - columns.start) / min(size) ** 2, abs=0.04
    )


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(pets):
    smooth = np.add.outer(np.arange(1200), np.arange(1600))[..., None] % 1024 / 4 * np.ones(3)
    Image.fromarray(smooth.astype(np.uint8)).save(pets / "train/cat/9.jpg", quality=95)
    found = DecodedSource(list_folder(pets), pets.parent / "data", image_size=16)
    found.prepare()
    with Image.open(pets / "train/cat/9.jpg") as whole:
        expected = np.asarray(whole.crop((200, 0, 1400, 1200)).resize((16, 16), Image.Resampling.BOX)).astype(float)
    assert np.abs(found.load("train")[0][-1].permute(1, 2, 0).numpy() - expected).mean() < 10


def test_val_is_a_split_of_its_own(pets):
    pixels = write(pets / "val/cat/0.png", seed=77)
    found = source(pets)
    found.prepare()
    images, labels = found.load("val")
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), pixels)
    assert labels.tolist() == [1]


@pytest.mark.parametrize("name", ["valid", "validation", "dev", "Val"])
def test_splits_may_have_other_names(pets, name):
    write(pets / name / "cat/0.png")
    (pets / "train").rename(pets / "Train")
    (pets / "test").rename(pets / "TEST")
    assert {split: len(files) for split, files in list_folder(pets).splits.items()} == {"train": 6, "test": 2, "val": 1}
    write(pets / "val/cat/0.png") if name != "Val" else (pets / "test").mkdir()
    assert "split" in user_error(lambda: list_folder(pets))


def test_a_class_without_test_images_is_allowed(pets):
    write(pets / "train/bee/0.png")
    assert decoded(pets, "test")[1].tolist() == [0, 2]


MISTAKES = {
    "no root": (lambda p: shutil.rmtree(p), ""),
    "no test": (lambda p: shutil.rmtree(p / "test"), ""),
    "empty class": (lambda p: [image.unlink() for image in (p / "train/cat").iterdir()], "train/cat"),
    "stranger": (lambda p: write(p / "test/zebu/0.png"), "test/zebu"),
    "dead link": (lambda p: (p / "test/cat/9.png").symlink_to("gone"), "test/cat/9.png"),
    "cut": (lambda p: cut(p / "train/cat/1.png", 0.7), "train/cat/1.png"),
    "size": (lambda p: write(p / "train/cat/1.png", size=(4, 5)), "train/cat/1.png"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_path(pets, mistake):
    spoil, path = MISTAKES[mistake]
    spoil(pets)
    assert str(pets / path) in user_error(lambda: source(pets).prepare())
    assert not cache_files(pets)


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["pixels", "added", "removed", "moved"])
def test_a_changed_file_is_decoded_again(pets, change):
    for path in pets.rglob("*.png"):
        os.utime(path, (1, 1))
    source(pets).prepare()
    train = pets / "train"
    if change == "pixels":
        write(train / "ant/0.png", seed=99)
    elif change == "added":
        write(train / "ant/9.png")
    elif change == "removed":
        (train / "ant/2.png").unlink()
    else:
        (train / "ant/2.png").rename(train / "cat/9.png")
    require_as_torchvisions_image_folder(pets)


@pytest.mark.parametrize("part", [0, 0.999])
def test_a_damaged_cache_is_made_again(pets, part):
    before, _ = decoded(pets)
    [path] = cache_files(pets)
    cut(path, part)
    assert torch.equal(decoded(pets)[0], before)


def test_of_two_processes_one_decodes(pets, monkeypatch):
    start, calls, loaded = fork.Barrier(2), fork.Value("i", 0), fork.Value("i", 0)
    save = torch.save

    def counted(*args):
        with calls.get_lock():
            calls.value += 1
        time.sleep(0.05)  # long enough for the other process to arrive
        save(*args)

    def work():
        start.wait()
        images, _ = decoded(pets)
        with loaded.get_lock():
            loaded.value += len(images)

    monkeypatch.setattr(torch, "save", counted)
    run_twice_at_once(work)
    assert calls.value == 1
    assert loaded.value == 12


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
