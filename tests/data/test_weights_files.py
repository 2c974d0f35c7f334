"""Hostile weights of a network: one error that names the flag, or the numbers as they were saved."""

import io
import warnings
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from hypothesis import strategies as st
from torchvision.models import get_model

from kvt.data.features import BackboneFeatures
from kvt.data.images import open_images
from tests.conftest import write_images
from tests.data.test_feature_files import Program
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, clear
from tests.training.test_load_checkpoint import archive, key_of_years

BACKBONE = "shufflenet_v2_x0_5"
KEY = "conv1.0.weight"
NUMBER = "conv1.1.num_batches_tracked"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """One image a class, and sound weights beside them."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "own", classes=2, size=32, mode="RGB", train=1, test=1)
    torch.manual_seed(0)
    torch.save(get_model(BACKBONE).state_dict(), root / "sound.pt")
    return root


@pytest.fixture
def look(held, images, in_tmp_dir):
    """Computes features with the weights in w.pt."""
    source = open_images("own", in_tmp_dir, images / "own")

    def call():
        (in_tmp_dir / ".cache").mkdir(exist_ok=True)
        made = []

        def compute():
            made.append(BackboneFeatures(source, BACKBONE, in_tmp_dir / "w.pt", in_tmp_dir).model())

        line = held(compute, "w.pt")
        assert not (in_tmp_dir / "ran").exists(), "code of the file ran"
        if line is None:
            pixels = torch.zeros(1, 3, 32, 32)
            with torch.inference_mode():
                assert made[0](pixels).dtype == torch.float32
        return line

    return call


def bomb() -> bytes:
    """A dictionary with a key that takes years to hash."""
    return b"\x80\x02" + key_of_years() + b"}h\x3cNs."


def old(pickled: bytes) -> bytes:
    """A file as torch wrote it before 1.6, with another pickle for its content."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    return file.getvalue().replace(b"\x80\x02}q\x00.", pickled)


def harmless(size: int) -> bytes:
    """A pickle of so many bytes."""
    return b"\x80\x02X" + (size - 10).to_bytes(4, "little") + b"x" * (size - 10) + b"0}."


def inflated() -> bytes:
    """A thousand times what it takes on the disk."""
    saved, file = io.BytesIO(), io.BytesIO()
    torch.save({KEY: torch.zeros(2**26)}, saved)
    with ZipFile(saved) as whole, ZipFile(file, "w", ZIP_DEFLATED) as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name))
    return file.getvalue()


FILES = {
    "key of years": lambda: archive(bomb()),
    "key of years, as before": lambda: old(bomb()),
    "key of years, an archive behind it": lambda: old(bomb()) + archive(b"\x80\x02}."),
    "key of years, a harmless archive behind it": lambda: archive(bomb()) + archive(harmless(len(bomb()))),
    "inflated": inflated,
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_grow(look, in_tmp_dir, kind):
    (in_tmp_dir / "w.pt").write_bytes(FILES[kind]())
    assert "--weights" in look()


CONTENT = {
    "program": lambda tensor: Program(),
    "nothing": lambda tensor: None,
    "list": lambda tensor: [tensor],
    "terabyte": lambda tensor: torch.zeros(1).expand(10**6, 10**6),
    "repeated": lambda tensor: torch.zeros(()).expand(tensor.shape),
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "integers": lambda tensor: tensor.to(torch.int8),
    "two numbers a byte": lambda tensor: torch.zeros(tensor.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "bytes": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "other": lambda tensor: tensor[..., None],
}
TAKEN = {"half", "double", "bytes"}
"""Numbers are numbers; and a network has use for its own alone."""


def put(path, sound, kind, key) -> None:
    state = torch.load(sound)
    state[key] = CONTENT[kind](state.get(key, torch.zeros(8, 8)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of tensors that torch is to give up
        torch.save(state, path)


@pytest.mark.parametrize("kind", CONTENT)
def test_content(look, images, in_tmp_dir, kind):
    put(in_tmp_dir / "w.pt", images / "sound.pt", kind, KEY)
    assert (look() is None) == (kind in TAKEN)


@pytest.mark.parametrize("metadata", [[], 5, {"": []}, {"": {"version": "x"}, "conv1.1": {"version": "x"}}])
def test_versions_of_layers_may_be_anything(look, images, in_tmp_dir, metadata):
    state = torch.load(images / "sound.pt")
    state._metadata = metadata
    torch.save(state, in_tmp_dir / "w.pt")
    assert (line := look()) is None or "--weights" in line


@pytest.mark.parametrize("key", [5, ("conv1", 0), "", "x" * 10**5])
def test_names_of_weights_may_be_anything(look, images, in_tmp_dir, key):
    torch.save(torch.load(images / "sound.pt") | {key: torch.zeros(1)}, in_tmp_dir / "w.pt")
    assert "--weights" in look()


def test_files_of_old_are_taken(look, images, in_tmp_dir):
    """Many that torchvision publishes are of that kind."""
    torch.save(torch.load(images / "sound.pt"), in_tmp_dir / "w.pt", _use_new_zipfile_serialization=False)
    assert look() is None


@fuzz(
    0.02,
    kind=st.none() | st.sampled_from([*CONTENT]),
    key=st.sampled_from([KEY, NUMBER, "more", "fc.weight"]),
    spoil=st.none() | CUT | FLIP | FILL | REPLACE,
)
def test_spoiled(look, images, in_tmp_dir, kind, key, spoil):
    clear(in_tmp_dir)
    path = in_tmp_dir / "w.pt"
    path.write_bytes((images / "sound.pt").read_bytes())
    if kind:
        put(path, images / "sound.pt", kind, key)
    whole = path.read_bytes()
    if spoil:
        spoil(path)
    line = look()
    if line is None:
        assert path.read_bytes() == whole, "a damaged file was taken"
    else:
        assert kind or spoil
