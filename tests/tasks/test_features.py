"""Features of images, computed by a pretrained network."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from kvt.data.images import DecodedImages
from kvt.tasks.anomaly import BackboneFeatures
from tests.conftest import slow, write_images
from tests.data.helpers import cut, user_error

BACKBONE = "shufflenet_v2_x0_5"  # small, and quick on small images


def random_network(backbone: str, seed: int = 0) -> nn.Module:
    """A network that tells images apart, unlike one of fresh weights."""
    torch.manual_seed(seed)
    model = get_model(backbone).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model(torch.randn(16, 3, 32, 32))  # statistics of inputs that differ
    return model.eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "mine.pth"
    torch.save(random_network(BACKBONE).state_dict(), path)
    return path


@pytest.fixture
def images(tmp_path) -> Path:
    write_images(tmp_path / "pets", classes=2, size=32, mode="RGB", train=3, test=2)
    return tmp_path / "pets"


def backbone_features(root: Path, weights: Path | None, backbone: str = BACKBONE) -> BackboneFeatures:
    data_dir = root.parent / "data"
    return BackboneFeatures(DecodedImages(root, root.name, data_dir), backbone, weights, data_dir)


def by_hand(model: nn.Module, last: nn.Linear, images: Tensor) -> Tensor:
    """What enters the last layer, pixels normalised by ImageNet's mean and standard deviation."""
    seen: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        model((images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize(
    ("backbone", "last", "mode"),
    [(BACKBONE, "fc", "RGB"), (BACKBONE, "fc", "L"), *slow(("mobilenet_v3_small", "classifier.3", "RGB"))],
)
def test_features_are_what_enters_the_last_layer(tmp_path, backbone, last, mode):
    """A grey image has three equal channels."""
    write_images(tmp_path / "pets", classes=2, size=32, mode=mode, train=3, test=2)
    model = random_network(backbone)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    source = backbone_features(tmp_path / "pets", tmp_path / "mine.pth", backbone)
    assert source.feature_dim == 1024
    source.prepare()
    for split, (features, labels) in source.load().items():
        pixels, expected = source.images.load(split)
        assert torch.equal(labels, expected)
        assert features.dtype == torch.float32
        seen = by_hand(model, model.get_submodule(last), pixels.expand(-1, 3, -1, -1))
        torch.testing.assert_close(features, seen, rtol=1e-3, atol=1e-4)
    assert features.std(0).max() > 1e-3  # or equality would show little


@pytest.mark.parametrize(
    ("backbone", "size", "seen"),
    [
        ("resnet34", (32, 32), (32, 32)),
        ("resnet34", (28, 500), (28, 224)),
        ("inception_v3", (32, 400), (75, 299)),
        ("vit_b_16", (32, 32), (224, 224)),
        ("alexnet", (32, 100), (63, 100)),
    ],
)
def test_images_keep_their_size_where_the_network_takes_it(images, backbone, size, seen):
    source = backbone_features(images, None, backbone)
    assert source.preprocess(torch.zeros(1, 3, *size, dtype=torch.uint8)).shape == (1, 3, *seen)


# ---- weights -------------------------------------------------------------------------------------


def publish(source: BackboneFeatures, path: Path, monkeypatch) -> Path:
    """Puts weights where torchvision keeps published ones, named as those are, as if they were the published ones."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(source.published.value, "url", f"https://download.pytorch.org/models/mine-{digits}.pth")
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder / f"mine-{digits}.pth"))


@pytest.mark.usefixtures("offline")
def test_published_weights_lie_where_torchvision_keeps_them_and_see_what_own_ones_see(images, tmp_path, monkeypatch):
    """GoogLeNet was trained on pixels normalised in another way, which torchvision undoes for its own weights alone."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.save(random_network("googlenet").state_dict(), tmp_path / "mine.pth")
    own, published = (backbone_features(images, path, "googlenet") for path in (tmp_path / "mine.pth", None))
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    message = user_error(published.prepare)
    for words in ("IMAGENET1K_V1", "no network", f"put {published.published.url} into {folder}", "weights"):
        assert words in message
    there = publish(published, tmp_path / "mine.pth", monkeypatch)
    published.prepare()
    own.prepare()
    assert published.cache != own.cache
    torch.testing.assert_close(published.load()["test"][0], own.load()["test"][0])
    published.cache.unlink()
    cut(there, 0.9)
    assert "cannot be read" in user_error(published.prepare)


def test_weights_of_other_precision_format_or_head(images, weights, tmp_path):
    state = torch.load(weights)
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    torch.save({**half, "fc.weight": torch.zeros(7, 1024)}, tmp_path / "half.pth")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)  # as torch before 1.6
    expected = backbone_features(images, weights).model().state_dict()
    for name in ("half.pth", "old.pth"):
        found = backbone_features(images, tmp_path / name).model().state_dict()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-3, rtol=1e-2)


# ---- the cache -----------------------------------------------------------------------------------


def test_weights_of_a_diverged_network_are_refused_and_nothing_is_cached(images, weights, tmp_path):
    state = torch.load(weights)
    spoilt = {name: value * torch.nan if value.is_floating_point() else value for name, value in state.items()}
    torch.save(spoilt, tmp_path / "nan.pth")
    source = backbone_features(images, tmp_path / "nan.pth")
    assert "'train' is not finite" in user_error(source.prepare)
    assert not source.cache.exists()


@pytest.mark.parametrize(("change", "files"), [("place", 1), ("weights", 2), ("images", 2)])
def test_features_are_computed_anew_where_weights_or_images_differ(tmp_path, images, weights, change, files):
    backbone_features(images, weights).prepare()
    other = tmp_path / "other.pth"
    shutil.copy(weights, other)
    if change == "weights":
        torch.save(random_network(BACKBONE, seed=1).state_dict(), other)
    elif change == "images":
        (images / "train" / "class0" / "0.png").unlink()
    backbone_features(images, other).prepare()
    assert len([*(tmp_path / "data" / ".cache").glob("features-*.pt")]) == files
