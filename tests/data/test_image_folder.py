"""Folders of images: the pixels that PIL reads, in the order of torchvision, or one line that names the culprit."""

import os
import re
import shutil
import struct
import time
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torchvision import datasets

from kvt.data.image_files import list_folder
from kvt.data.images import DecodedSource
from kvt.tasks import Images
from tests.conftest import REPOSITORY, SMALL_IMAGES, write_images
from tests.data.helpers import fork, run_twice_at_once, user_error
from tests.helpers.spoiling import clear, cut


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


def test_of_an_animation_the_first_picture_is_read(tmp_path):
    write_folder(tmp_path / "pets", "L")
    first, *others = (np.random.default_rng(seed).integers(0, 256, (4, 5), dtype=np.uint8) for seed in range(3))
    path = tmp_path / "pets/train/cat/9.gif"
    Image.fromarray(first).save(path, save_all=True, append_images=[Image.fromarray(other) for other in others])
    assert np.array_equal(decoded(tmp_path / "pets")[0][-1].max(0).values.numpy(), first)


def test_grey_images_in_a_colour_folder_become_rgb(pets):
    grey = write(pets / "train/cat/9.png", "L")
    assert np.array_equal(decoded(pets)[0][-1].numpy(), np.stack([grey] * 3))


def test_a_folder_is_coloured_if_any_image_is(tmp_path):
    write_folder(tmp_path / "pets", "L")
    assert source(tmp_path / "pets").shape == (1, 4, 5)
    write(tmp_path / "pets/test/cat/9.png", "RGB")
    assert source(tmp_path / "pets").shape == (3, 4, 5)
    assert decoded(tmp_path / "pets")[0].shape[1] == 3


def test_photographs_are_upright(pets):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: what is stored is to be turned by 90° clockwise
    Image.fromarray(pixels).save(pets / "train/cat/9.png", exif=exif)
    assert np.array_equal(decoded(pets)[0][-1].permute(1, 2, 0).numpy(), np.rot90(pixels, -1))


def save_tiff(path: Path, levels: np.ndarray, bits: int, photometric: int) -> None:
    """An uncompressed TIFF of grey levels, which PIL does not write."""
    if bits == 12:
        flat = levels.reshape(len(levels), -1)
        flat = np.pad(flat, ((0, 0), (0, flat.shape[1] % 2)))  # a row ends with a whole byte
        first, second = flat[:, 0::2], flat[:, 1::2]
        packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=2).astype(np.uint8)
        data = b"".join(row.tobytes()[: -(-levels.shape[1] * 12 // 8)] for row in packed)
    else:
        data = levels.astype("<u2").tobytes()
    height, width = levels.shape
    tags = [(256, 4, width), (257, 4, height), (258, 3, bits), (259, 3, 1), (262, 3, photometric), (273, 4, 8)]
    tags += [(277, 3, 1), (278, 4, height), (279, 4, len(data))]
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    head = b"II*\0" + struct.pack("<I", 8 + len(data))
    path.write_bytes(head + data + struct.pack("<H", len(tags)) + directory + bytes(4))


SIXTEEN = {  # what saves grey levels of 16 bits, and what is taken
    "png": (lambda path, levels: Image.fromarray(levels).save(path.with_suffix(".png")), lambda x: x >> 8),
    "tiff": (lambda path, levels: Image.fromarray(levels).save(path.with_suffix(".tiff")), lambda x: x >> 8),
    "tiff, 0 is white": (lambda path, x: save_tiff(path.with_suffix(".tif"), x, 16, 0), lambda x: 255 - (x >> 8)),
    "tiff of 12 bits": (lambda path, x: save_tiff(path.with_suffix(".tif"), x >> 4, 12, 1), lambda x: x >> 8),
    "pgm": (
        lambda path, x: path.with_suffix(".pgm").write_bytes(b"P5\n5 4\n65535\n" + x.astype(">u2").tobytes()),
        lambda x: x >> 8,
    ),
    "png with a transparent level": (
        lambda path, x: Image.fromarray(x).save(path.with_suffix(".png"), transparency=int(x[1, 2])),
        lambda x: np.where(x == x[1, 2], 255, x >> 8),
    ),
}


@pytest.mark.parametrize("kind", SIXTEEN)
def test_of_16_bits_the_upper_8_are_taken(tmp_path, kind):
    save, taken = SIXTEEN[kind]
    write_folder(tmp_path / "pets", "L")
    levels = np.random.default_rng(0).integers(0, 2**16, (4, 5), dtype=np.uint16)
    save(tmp_path / "pets/train/cat/9", levels)
    assert np.array_equal(decoded(tmp_path / "pets")[0][-1, 0].numpy(), taken(levels))


def save_png_of_48_bits(path: Path, pixels: np.ndarray, hidden: np.ndarray) -> None:
    """A PNG with a transparent colour, which PIL does not write."""
    height, width, _ = pixels.shape
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0),
        b"tRNS": hidden.astype(">u2").tobytes(),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)),
        b"IEND": b"",
    }
    parts = (struct.pack(">I", len(c)) + t + c + struct.pack(">I", zlib.crc32(t + c)) for t, c in chunks.items())
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def test_a_transparent_colour_of_16_bits_is_over_white(pets):
    pixels = np.random.default_rng(0).integers(0, 2**16, (4, 5, 3), dtype=np.uint16)
    pixels[2, 3] = pixels[1, 1] << 8  # whose upper bytes are the lower ones of the transparent colour
    save_png_of_48_bits(pets / "train/cat/9.png", pixels, pixels[1, 1])
    expected = pixels >> 8
    expected[1, 1] = 255
    assert np.array_equal(decoded(pets)[0][-1].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("mode", ["CMYK", "P", "RGBA", "LA", "1"])
def test_other_modes_are_read_as_pil_converts_them(pets, mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)).convert(mode)
    image.save(pets / "train/cat/9.tiff")
    expected = np.asarray(image.convert("L").convert("RGB") if mode in ("LA", "1") else image.convert("RGB"))
    assert np.array_equal(decoded(pets)[0][-1].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_what_is_transparent_is_over_white(tmp_path, mode):
    """Whatever its invisible colour; a file of mode P, L or RGB names one that is transparent."""
    generator = np.random.default_rng(0)
    is_grey = mode in ("L", "LA")
    colours = generator.integers(0, 200, (4, 5, 3 - 2 * is_grey), dtype=np.uint8).repeat(1 + 2 * is_grey, axis=2)
    alpha = generator.integers(0, 256, (4, 5, 1))
    write_folder(tmp_path / "pets", "L" if is_grey else "RGB")
    path, hidden = tmp_path / "pets/train/cat/9.png", (7, 7, 7)
    if mode in ("RGBA", "LA"):
        seen = colours[..., :1] if is_grey else colours
        Image.fromarray(np.concatenate([seen, alpha.astype(np.uint8)], axis=2)).save(path)
    else:
        alpha = 255 * (alpha > 99)
        seen = np.where(alpha > 0, colours, hidden).astype(np.uint8)
        seen[(seen == hidden).all(2) & (alpha[..., 0] > 0)] += 1
        image = Image.fromarray(seen).convert(mode, palette=Image.Palette.ADAPTIVE)
        named = {"P": lambda: image.getpixel(tuple(np.argwhere(alpha[..., 0] == 0)[0][::-1])), "L": lambda: hidden[0]}
        image.save(path, transparency=named.get(mode, lambda: hidden)())
        seen = seen[..., :1] if is_grey else seen
    expected = seen * (alpha / 255) + 255 * (1 - alpha / 255)
    found = decoded(tmp_path / "pets")[0][-1].permute(1, 2, 0).numpy()
    assert found.shape[2] == expected.shape[2]
    assert np.abs(found - expected).max() < 1


def test_a_picture_that_is_too_large_says_how_large(pets):
    path = pets / "train/cat/9.png"
    Image.new("1", (14_000, 14_000)).save(path)
    message = user_error(lambda: source(pets).prepare())
    assert message.startswith(f"{path} is too large: ")
    assert "196000000" in message
    assert str(2 * (Image.MAX_IMAGE_PIXELS or 0)) in message


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
    assert "both the split" in user_error(lambda: list_folder(pets))


def test_what_is_in_no_split_is_told(pets):
    assert list_folder(pets).left_out is None
    write(pets / "extra/cat/0.png")
    write(pets / "train/9.png")
    for name in ("train/cat/notes.txt", "test/ant/9.avif"):
        (pets / name).write_text("no image")
    told = "the folder extra, 3 of 11 files, which are not images in a class folder, such as test/ant/9.avif"
    assert list_folder(pets).left_out == told
    data = Images(root=str(pets), val_size=2, data_dir=str(pets.parent))
    data.prepare_data()
    data.setup("fit")
    assert data.notes["left_out"] == told


@pytest.mark.parametrize(("ending", "kind"), [("jfif", "JPEG"), ("jpe", "JPEG"), ("pbm", "PPM")])
def test_every_ending_of_a_format_is_read(pets, ending, kind):
    Image.new("1", (5, 4), 1).convert("1" if kind == "PPM" else "RGB").save(pets / f"train/cat/9.{ending}", kind)
    assert (decoded(pets)[0][-1] > 250).all()


def test_a_class_without_test_images_is_allowed(pets):
    write(pets / "train/bee/0.png")
    assert decoded(pets, "test")[1].tolist() == [0, 2]


def up(link: Path, target: str) -> None:
    link.symlink_to(target, target_is_directory=True)


# what somebody, or a program, leaves in a folder of images
CLUTTER = {
    "link to all classes": lambda p: up(p / "train/ant/up", ".."),
    "link to the other class": lambda p: up(p / "train/ant/cats", "../cat"),
    "link to the root": lambda p: up(p / "train/cat/up", "../.."),
    "link from a class before": lambda p: up(p / "test/ant/a", "../../train"),
    "notebook": lambda p: shutil.copytree(p / "train/cat", p / "train/cat/.ipynb_checkpoints"),
    "notebook among classes": lambda p: shutil.copytree(p / "train/cat", p / "train/.ipynb_checkpoints"),
    "Mac's halves": lambda p: (p / "train/cat/._0.png").write_bytes(b"\0\5\x16\7"),
    "Synology's": lambda p: shutil.copytree(p / "train/cat", p / "train/cat/@eaDir"),
    "Mac's archive": lambda p: shutil.copytree(p / "train/cat", p / "train/__MACOSX"),
}


@pytest.mark.parametrize("clutter", CLUTTER)
@pytest.mark.parametrize("has_classes", [True, False])
def test_each_image_is_read_once_and_clutter_is_none(pets, clutter, has_classes):
    if not has_classes:
        (pets / "train").rename(pets / "more")
    before = list_folder(pets)
    if not has_classes:
        (pets / "more").rename(pets / "train")
    CLUTTER[clutter](pets)
    if not has_classes:
        (pets / "train").rename(pets / "more")
    assert list_folder(pets)._replace(left_out=None) == before  # it counts a dead link


def test_a_class_may_be_a_link(pets):
    before = decoded(pets)
    (pets / "train/cat").rename(pets.parent / "cats")
    up(pets / "train/cat", str(pets.parent / "cats"))
    assert all(map(torch.equal, decoded(pets), before))


def _too_many_bits(path: Path) -> None:
    Image.fromarray((np.arange(20).reshape(4, 5) * 3000).astype(np.int32)).save(path)


# name: (what is done to the folder `pets`, the path that the message begins with, words of the message)
MISTAKES = {
    "no root": (lambda p: shutil.rmtree(p), "", "no such folder"),
    "no test": (lambda p: shutil.rmtree(p / "test"), "", "No such file or directory"),
    "no classes": (lambda p: clear(p / "train"), "train", "has no folder for a class"),
    "empty class": (lambda p: clear(p / "train/cat"), "train/cat", "contains no images"),
    "one folder twice": (lambda p: up(p / "val", "test"), "val/ant", "contains no images"),
    "stranger": (lambda p: write(p / "test/zebu/0.png"), "test/zebu", "is not a class of"),
    "first broken": (lambda p: (p / "train/ant/0.png").write_text("?"), "train/ant/0.png", "replace or remove it"),
    "dead link": (lambda p: (p / "test/cat/9.png").symlink_to("gone"), "test/cat/9.png", "replace or remove"),
    "cut": (lambda p: cut(p / "train/cat/1.png", 0.7), "train/cat/1.png", "replace or remove it"),
    "size": (lambda p: write(p / "train/cat/1.png", size=(4, 5)), "train/cat/1.png", "is 4x5 pixels,"),
    "16 bits": (lambda p: _too_many_bits(p / "train/cat/1.tiff"), "train/cat/1.tiff", "more than 16 bits"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_path(pets, mistake):
    spoil, path, remedy = MISTAKES[mistake]
    spoil(pets)
    message = user_error(lambda: source(pets).prepare())
    assert message.replace(":", "").startswith(f"{pets / path} ")
    assert remedy in message
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


def test_a_changed_file_of_the_same_size_and_time_is_decoded_again(pets):
    """As after cp -p or rsync."""
    path = pets / "train/ant/0.bmp"
    write(path, seed=1)
    before, times = decoded(pets)[0], os.stat(path)
    write(path, seed=2)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.stat(path).st_size == times.st_size
    assert not torch.equal(decoded(pets)[0], before)
    require_as_torchvisions_image_folder(pets)


@pytest.mark.parametrize("part", [0, 0.999])
def test_a_damaged_cache_is_made_again(pets, part):
    before, _ = decoded(pets)
    [path] = cache_files(pets)
    cut(path, part)
    assert torch.equal(decoded(pets)[0], before)


def test_what_a_killed_process_left_is_removed(pets):
    leftover = pets.parent / "data/.cache/pets-0123.pt.4567.tmp"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    source(pets).prepare()
    assert cache_files(pets, "*.tmp") == []


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
