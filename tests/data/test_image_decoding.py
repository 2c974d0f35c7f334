"""What a folder of images must never do: turn in circles, run a program, cut pixels off, trust what was kept."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kvt.data.image_folder import FolderSource
from kvt.system.errors import UserError

FILES = [
    f"{split}/{label}/{i}.png" for split, count in (("train", 2), ("test", 1)) for label in "ab" for i in range(count)
]


@pytest.fixture
def own(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    for name in FILES:
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(path)
    return tmp_path / "own"


def decoded(root: Path) -> torch.Tensor:
    source = FolderSource(root, root.parent / "data")
    source.prepare()
    return source.load("train")[0]


def refused(root: Path) -> str:
    with pytest.raises(UserError) as caught:
        decoded(root)
    assert str(root) in str(caught.value)
    return str(caught.value)


def test_folders_that_lead_to_each_other_count_once(own):
    """There are 20! ways through them."""
    before = decoded(own)
    folder = own / "train" / "a"
    for i in range(20):
        (folder / f"f{i}").mkdir()
        for j in range(20):
            (folder / f"f{i}" / f"to{j}").symlink_to(f"../f{j}")
    assert torch.equal(decoded(own), before)


def test_a_link_to_itself_is_no_class(own):
    (own / "train" / "loop").symlink_to("loop")
    assert len(decoded(own)) == 4


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_pixels_of_more_bits_are_not_cut_off(own, kind):
    Image.fromarray((np.arange(16).reshape(4, 4) * 4000).astype(kind)).save(own / "train" / "b" / "0.tiff")
    assert "more than 8 bits" in refused(own)


def test_no_picture_starts_a_program(own, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "gs"  # PIL starts it for a picture in PostScript
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"
    (own / "train" / "a" / "0.png").write_bytes(script)
    assert "no readable image" in refused(own)
    assert not (tmp_path / "ran").exists()


def test_more_pixels_than_memory(own):
    large = own / "train" / "a" / "0.png"
    Image.new("1", (6000, 6000)).save(large)  # a few kilobytes
    for i in range(20_000):
        os.link(large, large.with_name(f"more{i}.png"))
    assert "memory" in refused(own)


def test_a_folder_that_changes_while_it_is_read(own):
    source = FolderSource(own, own.parent / "data")
    os.utime(own / FILES[0], (5, 5))
    with pytest.raises(UserError, match="changed while"):
        source.prepare()


class Program:
    """What would make a folder, were it unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


def saved(content: object) -> bytes:
    with BytesIO() as file:
        torch.save(content, file)
        return file.getvalue()


def other(images: torch.Tensor) -> dict[str, object]:
    labels = torch.tensor([0, 0, 1, 1])
    test = (images[:2], labels[1:3])
    return {
        "program": Program(),
        "list": [1],
        "fewer": {"train": (images[:1], labels[:1]), "test": test},
        "labels": {"train": (images, labels + 7), "test": test},
        "dtype": {"train": (images.float(), labels), "test": test},
    }


@pytest.mark.parametrize("kind", [*other(torch.zeros(4, 3, 4, 4)), "damaged", "pipe"])
def test_what_was_kept_is_not_trusted(own, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    before = decoded(own)
    [kept] = (tmp_path / "data" / ".cache").glob("*.pt")
    if kind == "pipe":
        kept.unlink()
        os.mkfifo(kept)
    elif kind == "damaged":
        raw = kept.read_bytes()
        pixels = before.numpy().tobytes()
        assert raw.count(pixels) == 1
        kept.write_bytes(raw.replace(pixels, bytes([pixels[0] ^ 1]) + pixels[1:]))
    else:
        kept.write_bytes(saved(other(before)[kind]))
    images, labels = decoded(own), FolderSource(own, tmp_path / "data").load("train")[1]
    assert images.dtype == before.dtype
    assert torch.equal(images, before)
    assert labels.tolist() == [0, 0, 1, 1]
    assert not (tmp_path / "ran").exists()
