"""Images: splits, augmentation, normalisation."""

import lightning as L
import pytest
import torch

from kvt.system.errors import UserError
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


@pytest.mark.parametrize("size", [0, 36, 400, 0.001])
def test_some_images_must_train_and_some_validate(small_data, size):
    Images(data_dir=str(small_data)).prepare_data()
    with pytest.raises(UserError, match="val_size"):
        Images(val_size=size, data_dir=str(small_data)).load()


class Spy(ImageTask):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen: dict[str, list[torch.Tensor]] = {"train": [], "val": []}

    def compute_metrics(self, batch):
        self.seen["train" if self.training else "val"].append(batch[0])
        return super().compute_metrics(batch)


def test_only_training_batches_are_augmented(data):
    task = Spy(data.spec, patch=16, dim=8, depth=1, heads=2)
    L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
        task, data
    )
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


def test_mean_and_std_must_fit_the_channels(small_data):
    with pytest.raises(UserError, match="mean"):
        Images(mean=[0.1, 0.2], data_dir=str(small_data))
    with pytest.raises(UserError, match="std"):
        Images(std=[0.0], data_dir=str(small_data))
