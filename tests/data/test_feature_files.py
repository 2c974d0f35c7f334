"""Hostile files of features: one error that names the file, or the numbers as they were saved."""

import os
import warnings
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.data.tensor_files import read_features
from kvt.system.errors import UserError

PAIR = (torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 0, 1]))


class Program:
    """What would make a folder, were it unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("ran",))


def hostile() -> dict[str, object]:
    features, labels = PAIR
    return {
        "program": Program(),
        "claims a terabyte": (torch.zeros(1).expand(10**6, 10**6), torch.zeros(1).long().expand(10**6)),
        "repeated": (torch.zeros(3).expand(4, 3), labels),
        "sparse": (features.to_sparse(), labels),
        "meta": (features.to("meta"), labels),
        "complex": (features.to(torch.complex64), labels),
        "beyond float32": (features.double() * 1e300, labels),
        "two numbers a byte": (torch.zeros(4, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), labels),
        "beyond int64": (features, torch.tensor([2**63, 0, 1, 1], dtype=torch.uint64)),
        "containers": [[PAIR]],
    }


@pytest.mark.parametrize("kind", hostile())
@pytest.mark.parametrize("split", ["train", "test"])
def test_what_is_not_what_it_claims(tmp_path, monkeypatch, kind, split):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"train": PAIR, "test": PAIR, split: hostile()[kind]}, "own.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it would be a second line
        with pytest.raises(UserError, match=r"own\.pt") as caught:
            read_features(tmp_path / "own.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@given(at=st.floats(0, 1), bits=st.integers(1, 255), keep=st.just(1.0) | st.floats(0, 1))
def test_a_damaged_file_never_gives_other_numbers(tmp_path_factory, at, bits, keep):
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    torch.save({"train": PAIR, "test": PAIR}, path)
    raw = bytearray(path.read_bytes())
    raw[int(at * (len(raw) - 1))] ^= bits
    path.write_bytes(raw[: int(keep * len(raw))])
    with suppress(UserError):
        read = read_features(path)
        assert all(torch.equal(part, good) for pair in read.values() for part, good in zip(pair, PAIR, strict=True))


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "own.pt")
    with pytest.raises(UserError, match="pipe"):
        read_features(tmp_path / "own.pt")
