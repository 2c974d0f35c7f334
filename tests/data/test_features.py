"""Features of images: those of a pretrained network, and files of them."""

import hashlib
import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import get_model

from kvt.data import tensor_cache as cache_module
from kvt.data.features import BACKBONES, BackboneFeatures, FeatureFile
from kvt.data.images import FolderSource
from tests.conftest import write_features, write_images
from tests.data.test_images import cache_files, fork, kill_where_it_stalls, run_twice_at_once, user_error

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
    return BackboneFeatures(FolderSource(root, data_dir), backbone, weights, data_dir)


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
    ("backbone", "last", "width"),
    [(BACKBONE, "fc", 1024), ("mobilenet_v3_small", "classifier.3", 1024), ("resnet18", "fc", 512)],
)
def test_features_are_what_enters_the_last_layer(tmp_path, images, backbone, last, width):
    model = random_network(backbone)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    source = backbone_features(images, tmp_path / "mine.pth", backbone)
    assert source.width == width
    source.prepare()
    for split, (features, labels) in source.load().items():
        pixels, expected = source.images.load(split)
        assert torch.equal(labels, expected)
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, by_hand(model, model.get_submodule(last), pixels), rtol=1e-3, atol=1e-4)
    assert features.std(0).max() > 1e-3  # or equality would show little


def test_grey_images_are_seen_in_three_equal_channels(tmp_path, weights):
    write_images(tmp_path / "digits", classes=2, size=32, mode="L", train=2, test=1)
    source = backbone_features(tmp_path / "digits", weights)
    source.prepare()
    pixels, _ = source.images.load("train")
    model = random_network(BACKBONE)
    expected = by_hand(model, model.fc, pixels.repeat(1, 3, 1, 1))
    torch.testing.assert_close(source.load()["train"][0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("backbone", "size", "seen"),
    [
        ("resnet34", (32, 32), (32, 32)),
        ("resnet34", (28, 500), (28, 224)),
        ("inception_v3", (32, 400), (75, 299)),
        ("vit_b_16", (32, 32), (224, 224)),
        ("vit_b_16", (300, 100), (224, 224)),
        ("swin_v2_t", (32, 32), (256, 256)),
        ("alexnet", (32, 100), (63, 100)),
    ],
)
def test_images_keep_their_size_where_the_network_takes_it(images, backbone, size, seen):
    source = backbone_features(images, None, backbone)
    assert source.preprocess(torch.zeros(1, 3, *size, dtype=torch.uint8)).shape == (1, 3, *seen)


def test_enlarged_images_are_the_image(images):
    source = backbone_features(images, None, "vit_b_16")
    grey = source.preprocess(torch.full((1, 1, 32, 32), 51, dtype=torch.uint8))
    normalised = (torch.tensor([0.2, 0.2, 0.2]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(grey, normalised.view(1, 3, 1, 1).expand(1, 3, 224, 224))


@pytest.mark.parametrize(
    ("backbone", "width"),
    [
        ("resnet34", 512),
        ("vit_b_16", 768),
        ("vgg16", 4096),
        ("regnet_y_128gf", 7392),
        ("googlenet", 1024),
        ("swin_t", 768),
    ],
)
def test_the_width_of_large_networks_is_known_at_once(images, backbone, width, recwarn):
    start = time.perf_counter()
    assert backbone_features(images, None, backbone).width == width
    assert time.perf_counter() - start < 3  # regnet_y_128gf takes much longer to be made
    assert not recwarn.list


def test_backbones_are_classifiers_alone():
    assert "resnet34" in BACKBONES
    assert not [name for name in BACKBONES if any(other in name for other in ("rcnn", "deeplab", "r3d", "raft"))]


# ---- weights -------------------------------------------------------------------------------------


@pytest.fixture
def _no_network(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def publish(source: BackboneFeatures, path: Path, monkeypatch) -> Path:
    """Puts weights where torchvision keeps published ones, named as those are, as if they were the published ones."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setattr(source.published.value, "url", f"https://download.pytorch.org/models/mine-{digits}.pth")
    monkeypatch.setitem(source.published.meta, "_file_size", path.stat().st_size / 2**20)
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder / f"mine-{digits}.pth"))


@pytest.mark.usefixtures("_no_network")
def test_published_weights_lie_where_torchvision_keeps_them(images, weights, tmp_path, monkeypatch):
    published, own = backbone_features(images, None), backbone_features(images, weights)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    message = user_error(published.prepare)
    for words in (
        "IMAGENET1K_V1",
        "no network",
        f"put {published.published.url} into {folder}",
        "--weights",
        "--features",
    ):
        assert words in message
    assert "--data_dir" not in message
    shutil.copy(weights, folder / Path(published.published.url).name)  # others than were published
    assert "no network" in user_error(published.prepare)
    publish(published, weights, monkeypatch)
    published.prepare()
    own.prepare()
    assert published.cache != own.cache
    torch.testing.assert_close(published.load()["test"][0], own.load()["test"][0])


@pytest.mark.usefixtures("_no_network")
def test_own_weights_see_what_published_ones_see(images, tmp_path, monkeypatch):
    """GoogLeNet was trained on pixels normalised in another way, which torchvision undoes for its own weights alone."""
    torch.save(random_network("googlenet").state_dict(), tmp_path / "mine.pth")
    own, published = (backbone_features(images, path, "googlenet") for path in (tmp_path / "mine.pth", None))
    publish(published, tmp_path / "mine.pth", monkeypatch)
    pixels = own.preprocess(torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8))
    with torch.inference_mode():
        torch.testing.assert_close(own.model()(pixels), published.model()(pixels))


def test_weights_of_another_head_fit(images, weights, tmp_path):
    state = torch.load(weights)
    torch.save({**state, "fc.weight": torch.zeros(7, 1024), "fc.bias": torch.zeros(7)}, tmp_path / "seven.pth")
    one, other = backbone_features(images, weights), backbone_features(images, tmp_path / "seven.pth")
    for source in (one, other):
        source.prepare()
    assert torch.equal(one.load()["train"][0], other.load()["train"][0])


@pytest.mark.parametrize("backbone", ["googlenet", "inception_v3", "swin_v2_t", "regnet_y_400mf", "mnasnet0_5"])
def test_weights_that_torchvision_saves_are_weights_that_are_read(images, tmp_path, backbone, recwarn):
    model = get_model(backbone, **({"init_weights": False} if backbone in ("googlenet", "inception_v3") else {}))
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    source = backbone_features(images, tmp_path / "mine.pth", backbone)
    with torch.inference_mode():
        features = source.model()(source.preprocess(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)))
    assert features.shape == (1, source.width)
    assert not recwarn.list


@pytest.mark.parametrize("content", ["nothing", "junk", "list", "number", "other", "cut"])
def test_weights_that_cannot_be_used(images, weights, tmp_path, content):
    path = tmp_path / "broken.pth"
    if content == "junk":
        path.write_bytes(b"junk")
    elif content == "cut":
        path.write_bytes(weights.read_bytes()[:-100])
    elif content != "nothing":
        state = {"list": [1], "number": {"fc.weight": 1}, "other": get_model("mnasnet0_5").state_dict()}
        torch.save(state[content], path)
    message = user_error(lambda: backbone_features(images, path).prepare())
    assert f"{path} " in message
    expected = {
        "nothing": "is missing",
        "list": "state dict",
        "number": "state dict",
        "other": f"does not fit {BACKBONE}",
    }
    assert expected.get(content, "no readable file") in message
    assert len(message) < 350


@pytest.mark.usefixtures("_no_network")
def test_weights_that_would_run_code_do_not(images, tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"fc.weight": Evil()}, tmp_path / "evil.pth")
    assert "evil.pth" in user_error(lambda: backbone_features(images, tmp_path / "evil.pth").prepare())
    published = backbone_features(images, None)
    path = publish(published, tmp_path / "evil.pth", monkeypatch)  # eight digits of a checksum can be forged
    assert str(path) in user_error(published.prepare)
    assert not (tmp_path / "owned").exists()


# ---- the cache -----------------------------------------------------------------------------------


def features_files(tmp_path: Path, pattern: str = "features-*.pt") -> list[Path]:
    return cache_files(tmp_path, pattern)


def test_features_are_computed_once(tmp_path, images, weights, monkeypatch):
    source = backbone_features(images, weights)
    source.prepare()
    before = source.load()["train"][0]
    for path in set(cache_files(tmp_path)) - set(features_files(tmp_path)):
        path.unlink()  # the decoded images

    def fail(*_):
        raise AssertionError("computed twice")

    monkeypatch.setattr(BackboneFeatures, "_compute", fail)
    monkeypatch.setattr(FolderSource, "prepare", fail)
    monkeypatch.setattr(cache_module, "only_process", fail)  # a cache is used where nothing can be written
    again = backbone_features(images, weights)
    again.prepare()
    assert torch.equal(again.load()["train"][0], before)


@pytest.mark.parametrize("change", ["backbone", "weights", "images"])
def test_what_differs_is_computed_anew(tmp_path, images, weights, change):
    backbone_features(images, weights).prepare()
    backbone, path = BACKBONE, tmp_path / "other.pth"
    if change == "backbone":
        backbone = "mnasnet0_5"
        torch.save(random_network(backbone).state_dict(), path)
    elif change == "weights":
        torch.save(random_network(BACKBONE, seed=1).state_dict(), path)
    else:
        shutil.copy(weights, path)
        (images / "train" / "class0" / "0.png").unlink()
    backbone_features(images, path, backbone).prepare()
    assert len(features_files(tmp_path)) == 2


def test_weights_may_move(tmp_path, images, weights, monkeypatch):
    backbone_features(images, weights).prepare()
    shutil.copy(weights, tmp_path / "moved.pth")
    monkeypatch.delattr(BackboneFeatures, "_compute")
    source = backbone_features(images, tmp_path / "moved.pth")
    assert source.content == backbone_features(images, weights).content


@pytest.mark.parametrize("keep", [0.0, 0.999])
def test_cut_features_are_computed_anew(tmp_path, images, weights, keep):
    source = backbone_features(images, weights)
    source.prepare()
    before = source.load()["test"][0]
    [path] = features_files(tmp_path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    source.prepare()
    assert torch.equal(source.load()["test"][0], before)


def test_two_processes_compute_once(tmp_path, images, weights, monkeypatch):
    FolderSource(images, tmp_path / "data").prepare()  # or one process would wait for the images alone
    start, computed, loaded = fork.Barrier(2), fork.Value("i", 0), fork.Value("i", 0)
    compute = BackboneFeatures._compute

    def counted(self):
        with computed.get_lock():
            computed.value += 1
        time.sleep(0.2)  # long enough for the other process to arrive
        return compute(self)

    def work():
        torch.set_num_threads(1)
        start.wait()
        source = backbone_features(images, weights)
        source.prepare()
        with loaded.get_lock():
            loaded.value += len(source.load()["train"][0])

    monkeypatch.setattr(BackboneFeatures, "_compute", counted)
    run_twice_at_once(work)
    assert computed.value == 1
    assert loaded.value == 12


def test_a_killed_process_leaves_nothing_in_the_way(tmp_path, images, weights, monkeypatch):
    FolderSource(images, tmp_path / "data").prepare()

    def work(stall):
        torch.set_num_threads(1)
        monkeypatch.setattr(os, "replace", stall)
        backbone_features(images, weights).prepare()

    kill_where_it_stalls(work)
    assert len(features_files(tmp_path, "features-*.tmp")) == 1
    assert not features_files(tmp_path)
    backbone_features(images, weights).prepare()
    assert len(features_files(tmp_path)) == 1
    assert not features_files(tmp_path, "*.tmp")


# ---- files of features ---------------------------------------------------------------------------


def test_a_file_of_features_is_read_whole(tmp_path):
    write_features(tmp_path / "mine.pt", classes=3, width=5, train=4, test=2)
    source = FeatureFile(tmp_path / "mine.pt")
    assert source.width == 5
    source.prepare()
    written = torch.load(tmp_path / "mine.pt")
    for split, (features, labels) in source.load().items():
        assert torch.equal(features, written[split][0])
        assert torch.equal(labels, written[split][1])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision_and_labels_of_any_size(tmp_path, kind):
    pair = [torch.randn(4, 3).to(kind), torch.tensor([0, 1, 0, 1], dtype=torch.uint8)]
    torch.save({"train": pair, "test": pair, "more": "is left alone"}, tmp_path / "mine.pt")
    features, labels = FeatureFile(tmp_path / "mine.pt").load()["test"]
    assert (features.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert torch.equal(features, pair[0].float())


def test_content_is_that_of_the_file(tmp_path):
    contents = []
    for name, seed in (("one", 0), ("two", 1)):
        write_features(tmp_path / f"{name}.pt", classes=3, width=5, seed=seed)
        shutil.copy(tmp_path / f"{name}.pt", tmp_path / f"{name}-moved.pt")
        here, moved = (FeatureFile(tmp_path / f"{name}{where}.pt").content for where in ("", "-moved"))
        assert here == moved
        contents.append(here)
    assert contents[0] != contents[1]


GOOD = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
MISTAKES = {
    "no dictionary": ([GOOD, GOOD], "is no file of features"),
    "no test": ({"train": GOOD}, "is no file of features"),
    "no pair": ({"train": GOOD, "test": GOOD[0]}, "'test' is no pair of tensors"),
    "three": ({"train": GOOD, "test": (*GOOD, GOOD[1])}, "'test' is no pair of tensors"),
    "no tensors": ({"train": ([1.0], [1]), "test": GOOD}, "'train' is no pair of tensors"),
    "images": ({"train": (torch.randn(4, 3, 2), GOOD[1]), "test": GOOD}, "'train' has features of shape (4, 3, 2)"),
    "integers": ({"train": GOOD, "test": (GOOD[1][:, None], GOOD[1])}, "torch.int64, not (images, width) and floating"),
    "empty": ({"train": GOOD, "test": (torch.zeros(0, 3), GOOD[1][:0])}, "'test' has features of shape (0, 3)"),
    "no width": ({"train": GOOD, "test": (torch.zeros(4, 0), GOOD[1])}, "'test' has features of shape (4, 0)"),
    "unequal": ({"train": GOOD, "test": (GOOD[0], GOOD[1][:3])}, "'test' has 4 features and labels of shape (3,)"),
    "widths": ({"train": GOOD, "test": (GOOD[0][:, :2], GOOD[1])}, "'train' are 3 wide, of 'test' 2"),
    "nan": ({"train": (GOOD[0] * torch.nan, GOOD[1]), "test": GOOD}, "'train' has features that are infinite or not a"),
    "infinite": ({"train": GOOD, "test": (GOOD[0] / 0, GOOD[1])}, "'test' has features that are infinite"),
    "negative": ({"train": (GOOD[0], GOOD[1] - 1), "test": GOOD}, "'train' has labels (torch.int64)"),
    "floating": ({"train": (GOOD[0], GOOD[1].float()), "test": GOOD}, "'train' has labels (torch.float32)"),
    "truth": ({"train": (GOOD[0], GOOD[1].bool()), "test": GOOD}, "'train' has labels (torch.bool)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_that_names_the_file(tmp_path, mistake):
    content, words = MISTAKES[mistake]
    torch.save(content, tmp_path / "mine.pt")
    message = user_error(lambda: FeatureFile(tmp_path / "mine.pt"))
    assert message.startswith(str(tmp_path / "mine.pt"))
    assert words in message


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 broken zip"], ids=["empty", "junk", "zip"])
def test_files_that_cannot_be_read(tmp_path, content):
    (tmp_path / "mine.pt").write_bytes(content)
    assert "no readable file of features" in user_error(lambda: FeatureFile(tmp_path / "mine.pt"))
    assert "is missing" in user_error(lambda: FeatureFile(tmp_path / "nowhere.pt"))
    assert "is missing" in user_error(lambda: FeatureFile(tmp_path / "mine.pt" / "below.pt"))
    assert "is a folder" in user_error(lambda: FeatureFile(tmp_path))
