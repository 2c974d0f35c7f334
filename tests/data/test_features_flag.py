"""Hostile features, of --features or kept from before: one line that names the file, or a run with its numbers."""

import warnings

import pytest
import torch
from hypothesis import strategies as st
from torchvision.models import get_model

from kvt.data.features import BackboneFeatures
from kvt.data.images import open_images
from kvt.data.tensor_files import read_features
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, SMALL, write_features, write_images
from tests.data.test_feature_files import hostile
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, clear

BACKBONE = "shufflenet_v2_x0_5"
SPLITS = ["train", "test"]


def fit(*flags: str) -> None:
    short = ["--set_size", "4", "--val_size", "0.4", "--fast_dev_run", "1"]
    CLI(["fit", "--config", str(CONFIGS / "anomaly.yaml"), *QUIET, *SMALL["anomaly"], *short, *flags], test=True)


WRONG = st.sampled_from(sorted(hostile())) | st.sampled_from(["nan", "few", "one class", "narrow", "negative", "half"])


def put(path, split, kind) -> None:
    """A split of another kind."""
    splits = torch.load(path)
    features, labels = splits[split]
    made = {
        "nan": (features * torch.nan, labels),
        "few": (features[:4], labels[:4]),
        "one class": (features, labels * 0),
        "narrow": (features[:, :2], labels),
        "negative": (features, labels - 1),
        "half": (features.half(), labels.short()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of quantities that torch is to give up
        torch.save(splits | {split: (made | hostile())[kind]}, path)


@fuzz(
    0.025,
    kind=st.none() | WRONG,
    split=st.sampled_from(SPLITS),
    spoil=st.none() | CUT | FLIP | FILL | REPLACE,
)
def test_files(held, in_tmp_dir, kind, split, spoil):
    clear(in_tmp_dir)
    write_features(path := in_tmp_dir / "own.pt", classes=3, width=5, train=10)
    if kind:
        put(path, split, kind)
    whole = path.read_bytes()
    if spoil:
        spoil(path)
    line = held(lambda: fit("--features", "own.pt"), "own.pt", "set_size", "class")
    assert not (in_tmp_dir / "ran").exists()
    if line is None:
        assert path.read_bytes() == whole, "a damaged file was taken"
        assert read_features(path)["train"][0].isfinite().all()
    else:
        assert kind or spoil


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Images, weights of a network, and its features, which are there as after a first run."""
    root = tmp_path_factory.mktemp("images")
    write_images(root / "own", classes=3, size=32, mode="RGB", train=10)
    torch.manual_seed(0)
    torch.save(get_model(BACKBONE).state_dict(), root / "weights.pt")
    return root


@fuzz(0.015, spoil=CUT | FLIP | FILL | REPLACE)
def test_kept_from_before(held, in_tmp_dir, kept, spoil):
    flags = ["--root", str(kept / "own"), "--backbone", BACKBONE, "--weights", str(kept / "weights.pt")]
    source = BackboneFeatures(open_images("own", in_tmp_dir, kept / "own"), BACKBONE, kept / "weights.pt", in_tmp_dir)
    if source.cache.is_dir():
        source.cache.rmdir()
    source.cache.unlink(missing_ok=True)
    source.prepare()
    sound = source.load()
    spoil(source.cache)
    was_folder = source.cache.is_dir()
    line = held(lambda: fit(*flags, "--data_dir", str(in_tmp_dir)), ".cache")
    assert (line is not None) == was_folder
    if line is None:
        torch.testing.assert_close(source.load(), sound)
