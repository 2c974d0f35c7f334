"""Images: splits, augmentation, normalisation."""

import os
import shutil
from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from kvt.run.config import RunConfig
from kvt.system import UserError
from kvt.tasks import Images, ImageTask


@pytest.fixture
def data(small_data) -> Images:
    data = Images(dataset="cifar10", val_size=7, batch_size=5, data_dir=str(small_data))
    data.prepare_data()
    data.setup("fit")
    return data


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_validation_is_held_out_of_train_and_test_is_apart(data):
    train, val, test = (rows(data.splits[split][0]) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (29, 7, 12)
    assert not train & val
    assert not (train | val) & test
    assert train | val == rows(data.source.load("train")[0])


@pytest.mark.parametrize("settings", [{"val_size": 0}, {"val_size": 36}, {"val_size": 0.001}, {"std": [0.0]}], ids=str)
def test_numbers_that_the_images_do_not_allow_are_named(small_data, settings):
    with pytest.raises(UserError, match=min(settings)):
        Images(**settings, data_dir=str(small_data)).load()


class Spy(ImageTask):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[str, list[torch.Tensor]] = {"train": [], "val": []}

    def compute_metrics(self, batch):
        self.seen["train" if self.training else "val"].append(batch[0])
        return super().compute_metrics(batch)


def test_only_training_batches_are_augmented(data):
    task = Spy(data.spec, patch=16, dim=8, depth=1, heads=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(task, data)
    originals = rows(data.splits["val"][0].float())
    assert {image.float().numpy().tobytes() for image in torch.cat(task.seen["val"])} == originals
    train = rows(data.splits["train"][0].float())
    changed = [image.numpy().tobytes() not in train for image in torch.cat(task.seen["train"]).float()]
    assert sum(changed) > len(changed) / 2


def test_pixels_are_normalised(data):
    task = ImageTask(data.spec, patch=16, dim=8, depth=1, heads=2)
    inputs = []
    task.model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    images = data.splits["train"][0]
    task(images)
    mean, std = (torch.tensor(data.spec[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(inputs[0], (images / 255 - mean) / std)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Photographs of any size in two classes, one of which is light."""
    generator = np.random.default_rng(0)
    for n in range(24):
        name, level = ("day", 150) if n % 2 else ("night", 40)
        split = "train" if n < 16 else "test" if n < 20 else "val"
        path = tmp_path / "photos" / split / name / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = generator.integers(20, 60, 2)
        pixels = generator.integers(level, level + 60, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def test_mean_and_deviation_of_a_folder_are_those_of_its_pixels_to_train_on(photos, tmp_path):
    settings = {"root": str(photos), "image_size": 16, "data_dir": str(tmp_path / "data")}
    data = Images(**settings)
    data.setup("fit")
    assert {split: len(labels) for split, (_, labels) in data.splits.items()} == {"train": 16, "val": 4, "test": 4}
    pixels = data.splits["train"][0].double() / 255
    assert data.spec["mean"] == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-4)
    assert data.spec["std"] == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-4)
    assert Images(mean=0.5, **settings).spec == data.spec | {"mean": [0.5]}
    assert Images(std=[0.2, 0.3, 0.4], **settings).spec == data.spec | {"std": [0.2, 0.3, 0.4]}


CIFAR = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}  # CIFAR-10's
TINY = ["--image_size", "16", "--patch", "8", "--dim", "16", "--depth", "1", "--heads", "2", "--batch_size", "8"]
MNIST = {"mean": [0.1307], "std": [0.3081]}


@pytest.mark.parametrize(
    ("dataset", "numbers"), [("mnist", MNIST), ("fashion_mnist", MNIST), ("cifar10", CIFAR), ("cifar100", CIFAR)]
)
def test_a_published_data_set_has_the_numbers_of_the_papers_code(small_data, dataset, numbers):
    """From Python, by its YAML, and in what a checkpoint keeps."""
    config = RunConfig.from_name(dataset).data["init_args"]
    for settings in ({"dataset": dataset}, config, {"dataset": dataset, **numbers}):
        data = Images(**settings | {"data_dir": str(small_data)})
        assert {name: data.spec[name] for name in numbers} == numbers
        assert {name: data.hparams[name] for name in numbers} == numbers


def test_a_root_has_its_own_numbers_and_a_checkpoint_keeps_them(photos, experiment, kvt):
    flags = ["--root", str(photos), *TINY, "--max_epochs", "1", "--val_size", "6"]
    measured = Images(root=str(photos), image_size=16).spec
    for given in ({}, CIFAR):
        words = [f"--{name}={value}" for name, value in given.items()]
        path = experiment("cifar10", *flags, *words)["path"].parent / "checkpoints" / "best.ckpt"
        spec = torch.load(path, weights_only=True)["hyper_parameters"]["spec"]
        assert {name: spec[name] for name in CIFAR} == (given or {name: measured[name] for name in CIFAR})
        kvt("validate", "--ckpt_path", str(path))


def test_a_folder_without_a_test_split_is_trained_on_and_validated(photos, experiment, kvt, mistake, monkeypatch):
    shutil.rmtree(photos / "test")
    said = []
    monkeypatch.setattr("kvt.tasks.images.say", said.append)
    result = experiment("cifar10", "--root", str(photos), *TINY, "--max_epochs", "1")
    assert said == ["photos has no test split: nothing is tested"]
    assert "val/acc" in result
    assert "test/acc" not in result
    best = ("--ckpt_path", str(result["path"].parent / "checkpoints" / "best.ckpt"))
    kvt("validate", *best)
    kvt("predict", *best)
    targets = pd.read_csv(result["path"].parent / "predictions.csv").target
    assert [*targets] == ["day", "day", "night", "night"]
    assert "no test split" in mistake(lambda: kvt("test", *best))
    assert "no test split" in mistake(lambda: experiment("anomaly", "--root", str(photos)))


def test_a_model_is_tested_on_another_folder_with_its_own_mean_and_std(photos, experiment, kvt, mistake, capsys):
    result = experiment("cifar10", "--root", str(photos), *TINY, "--max_epochs", "20", "--augment", "false")
    other = shutil.copytree(photos, photos.parent / "other")
    for path in other.glob("train/*/*.jpg"):
        Image.eval(Image.open(path), lambda level: level // 2).save(path)
    best = ("--ckpt_path", str(result["path"].parent / "checkpoints" / "best.ckpt"), "--root", str(other))
    assert Images(root=str(other), image_size=16).spec != Images(root=str(photos), image_size=16).spec
    capsys.readouterr()
    kvt("test", *best)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "test/loss" in line]
    assert float(line.split("│")[2]) == pytest.approx(result["test/loss"])
    kvt("predict", *best)
    found = pd.read_csv(result["path"].parent / "predictions.csv")
    assert [*found.file] == sorted(os.path.relpath(path, other) for path in other.glob("test/*/*.jpg"))
    assert [*found.target] == [*found.prediction] == ["day", "day", "night", "night"]
    assert (found.probability > 0.5).all()
    assert "other data" in mistake(lambda: kvt("validate", *best))
    assert "mean" in mistake(lambda: kvt("test", *best, "--mean", "0.3"))
    (other / "train/day").rename(other / "train/dusk")
    (other / "test/day").rename(other / "test/dusk")
    shutil.rmtree(other / "val")
    assert "classes" in mistake(lambda: kvt("test", *best))


def test_one_image_a_file_and_a_batch_are_predicted_alike(data, tmp_path):
    task = ImageTask(data.spec, patch=8, dim=8, depth=1, heads=2).eval()
    images = data.splits["val"][0]
    batch = task.predict(images)
    assert torch.equal(task.predict(images.float()), batch)
    for number, image in enumerate(images):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.save(tmp_path / "one.png")
        for one in (image, picture, tmp_path / "one.png", str(tmp_path / "one.png")):
            assert task.predict(one).tolist() == [batch[number]]
    assert task.predict(Image.new("L", (300, 90))).shape == (1,)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    assert torch.equal(task.predict(pictures), batch)
    assert [task.class_title(label) for label in batch.tolist()] == [data.spec["classes"][label] for label in batch]


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (torch.rand(2, 3, 32, 32), "from 0 to 255"),
        (torch.rand(2, 3, 32, 32) * 300 - 20, "from 0 to 255"),
        (torch.zeros(2, 1, 32, 32, dtype=torch.uint8), r"\(B, 3, 32, 32\)"),
        ("nowhere.png", "nowhere.png is not a readable image"),
    ],
)
def test_what_is_no_image_is_refused(data, images, told):
    task = ImageTask(data.spec, patch=8, dim=8, depth=1, heads=2).eval()
    with pytest.raises(UserError, match=told):
        task.predict(images)
