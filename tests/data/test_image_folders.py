"""Hostile folders of images: one line that names the culprit, or the pixels that PIL sees."""

import os
import shutil
import struct
import zlib
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from kvt.data.image_folder import FolderSource
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET
from tests.helpers import spoiling
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, clear, fill, rename

TINY = ["--dim", "8", "--depth", "1", "--heads", "1", "--patch", "1", "--val_size", "1", "--batch_size", "2"]
TINY += ["--mean", "[0.5]", "--std", "[0.5]"]
MODES = {
    "png": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "jpg": ["L", "RGB", "CMYK"],
    "tiff": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr", "LAB"],
    "webp": ["RGB", "RGBA"],
    "bmp": ["1", "L", "P", "RGB"],
    "ppm": ["RGB"],
    "pgm": ["L"],
}
KINDS = st.sampled_from([(suffix, mode) for suffix, modes in MODES.items() for mode in modes])
SIZES = st.sampled_from([(1, 1), (1, 5), (5, 1), (3, 2), (8, 8)])
FILES = [f"{split}/{label}/{i}" for split, count in (("train", 2), ("test", 1)) for label in "ab" for i in range(count)]
PROGRAM = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(ran) (w) file closefile\nshowpage\n"


def picture(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Random pixels."""
    rng = np.random.default_rng(seed)
    if mode in ("I;16", "I", "F"):
        kind = {"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]
        return Image.fromarray(rng.integers(0, 2**16, size[::-1]).astype(kind))
    colours = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    if mode == "P":
        return colours.quantize(7)
    image = Image.new(mode, size) if mode == "LAB" else colours.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(rng.integers(0, 256, size[::-1], dtype=np.uint8)))
    return image


def encoded(image: Image.Image, suffix: str, **settings) -> bytes:
    with BytesIO() as file:
        image.save(file, {"jpg": "JPEG", "pgm": "PPM"}.get(suffix, suffix.upper()), **settings)
        return file.getvalue()


def write_folder(root: Path, suffix: str, mode: str, size: tuple[int, int]) -> None:
    for seed, name in enumerate(FILES):
        path = root / f"{name}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(mode, size, seed), suffix))


# ---- what may become of a file -------------------------------------------------------------------


def redraw(path: Path, kind: tuple[str, str], size: tuple[int, int] | None, frames: int, turned: int) -> None:
    """Another picture under the same name: of other kind, size, number of frames, and turned by its EXIF data."""
    suffix, mode = kind
    with Image.open(path) as image:
        size = size or image.size
    settings = {}
    if frames > 1 and suffix in ("png", "webp", "tiff"):
        others = [picture(mode, size, seed) for seed in range(100, 99 + frames)]
        settings |= {"save_all": True, "append_images": others}
    if turned and suffix in ("jpg", "png", "webp", "tiff"):
        exif = Image.Exif()
        exif[0x0112] = turned
        settings["exif"] = exif
    path.write_bytes(encoded(picture(mode, size, 99), suffix, **settings))


def claim(path: Path, size: tuple[int, int], rows: int) -> None:
    """A PNG that claims a size and holds a few rows of it."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", *size, 1, 0, 0, 0, 0)
    data = zlib.compress(bytes((size[0] // 8 + 2) * min(rows, 10**7 // (size[0] // 8 + 2))))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


NAMES = [*spoiling.NAMES, "0.PnG", "0.TIF", "0*.txt"]
RENAME = st.builds(partial, st.just(rename), name=st.sampled_from(NAMES))
FILE = (
    CUT
    | FLIP
    | FILL
    | REPLACE
    | RENAME
    | st.builds(partial, st.just(fill), content=st.just(PROGRAM))
    | st.builds(
        partial,
        st.just(redraw),
        kind=KINDS,
        size=st.none() | SIZES,
        frames=st.integers(1, 3),
        turned=st.integers(0, 9),
    )
    | st.builds(
        partial,
        st.just(claim),
        size=st.sampled_from([(60_000, 60_000), (10_000, 10_000), (12_000, 8_000), (2**31 - 1, 1), (0, 5)]),
        rows=st.sampled_from([0, 1, 100]),
    )
)

# ---- what may become of a folder -----------------------------------------------------------------


def without(folder: Path, rest: str) -> None:
    """All that was in it is gone; instead there is something else, or nothing, or not even the folder."""
    shutil.rmtree(folder)
    if rest == "file":
        folder.write_bytes(b"")
    elif rest == "pipe":
        os.mkfifo(folder)
    elif rest == "itself":
        folder.symlink_to(folder.name)
    elif rest == "nowhere":
        folder.symlink_to("nowhere")
    elif rest != "gone":
        folder.mkdir()
        if rest == "text":
            (folder / "read.me").write_text("no pictures here")
        elif rest == "hidden":
            (folder / ".hidden").mkdir()


def circles(folder: Path, count: int) -> None:
    """Folders that all lead to each other, and to where they are: `count`! ways through them."""
    for i in range(count):
        (folder / f"f{i}").mkdir()
        for j in range(count):
            (folder / f"f{i}" / f"to{j}").symlink_to(f"../f{j}")
        (folder / f"f{i}" / "up").symlink_to("..")
    (folder / "me").symlink_to(".")
    (folder / "loop").symlink_to("loop")


def many(folder: Path, count: int) -> None:
    for i in range(count):
        (folder / f"many{i}").mkdir(exist_ok=True)


CLASSES = ["train/a", "train/b", "test/a", "test/b"]
FOLDER = (
    st.builds(
        partial,
        st.just(without),
        rest=st.sampled_from(["gone", "file", "pipe", "itself", "nowhere", "nothing", "text", "hidden"]),
    )
    | st.builds(partial, st.just(many), count=st.just(2000))
    | RENAME
)
SPOILED = st.lists(
    st.tuples(st.sampled_from(FILES), FILE)
    | st.tuples(st.sampled_from(["", "train", "test", *CLASSES]), FOLDER)
    | st.tuples(st.sampled_from(CLASSES), st.builds(partial, st.just(circles), count=st.sampled_from([1, 2, 20]))),
    min_size=1,
    max_size=3,
)


def spoil(root: Path, spoiled) -> None:
    """Does to the folder what there is still something to be done to."""
    for place, change in spoiled:
        found = next(iter(root.parent.glob(f"{root.name}/{place}.*")), None) if place in FILES else root / place
        if found and (found.is_file() if place in FILES else found.is_dir() and not found.is_symlink()):
            with suppress(OSError, ValueError):  # PIL or the file system cannot even make it
                change(found)


@pytest.fixture
def elsewhere(tmp_path_factory, monkeypatch) -> Path:
    """The data folder, out of the way."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KVT_DATA_DIR", str(folder))
    return folder


def fit(*flags: str) -> None:
    CLI(["fit", "--config", str(CONFIGS / "cifar10.yaml"), *QUIET, *TINY, "--fast_dev_run", "1", *flags], test=True)


def seen(root: Path, split: str) -> tuple[np.ndarray, list[int]]:
    """The pixels (N, H, W, C) that PIL sees in all pictures of a split, in the order of torchvision's ImageFolder."""
    classes = sorted(entry.name for entry in os.scandir(root / "train") if entry.is_dir() and entry.name[0] != ".")
    every = {}
    for part in ("train", split):
        every[part] = [
            (os.path.join(folder, name), label)
            for label, kind in enumerate(classes)
            for folder, _, names in sorted(os.walk(root / part / kind))
            for name in sorted(names)
            if name.lower().endswith((".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"))
        ]
    with Image.open(every["train"][0][0]) as first:
        mode = "L" if first.mode in ("1", "L", "LA") else "RGB"
    pixels = []
    for path, _ in every[split]:
        with Image.open(path) as image:
            pixels.append(np.atleast_3d(image.convert(mode)))
    return np.stack(pixels), [label for _, label in every[split]]


@fuzz(0.16, kind=KINDS, size=SIZES, spoiled=SPOILED, by_name=st.booleans())
def test_folders(held, in_tmp_dir, elsewhere, kind, size, spoiled, by_name):
    root = elsewhere / "cifar10" if by_name else in_tmp_dir / "own"
    for folder in (in_tmp_dir, elsewhere):
        clear(folder)
    write_folder(root, *kind, size)
    spoil(root, spoiled)
    if by_name and not (root / "train").is_dir():
        return  # then it is no folder of images
    line = held(lambda: fit(*([] if by_name else ["--root", "own"])), root.name)
    assert not (in_tmp_dir / "ran").exists()
    if line is None:
        source = FolderSource(root, elsewhere)
        for split in ("train", "test"):
            images, labels = source.load(split)
            pixels, classes = seen(root, split)
            assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), pixels)
            assert labels.tolist() == classes
