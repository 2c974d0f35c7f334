"""Set anomaly detection: the splits and the model."""

import pytest
import torch

from kvt.system import UserError
from kvt.tasks import AnomalyTask, SetAnomalies
from tests.conftest import write_features
from tests.helpers.small_models import opinionated

SPLITS = ("train", "val", "test")


@pytest.fixture
def file(tmp_path) -> str:
    write_features(tmp_path / "mine.pt", classes=4, width=8, train=30, test=11)
    return str(tmp_path / "mine.pt")


def loaded(file: str, **settings) -> SetAnomalies:
    data = SetAnomalies(features=file, **{"set_size": 4, **settings})
    data.prepare_data()
    data.setup("fit")
    return data


def images(data: SetAnomalies, split: str) -> set[bytes]:
    return {row.numpy().tobytes() for row in data.splits[split][0]}


def test_splits_are_apart_and_balanced(file):
    data = loaded(file, val_size=0.2)
    assert [data.splits[split][1].bincount().tolist() for split in SPLITS] == [[24] * 4, [6] * 4, [11] * 4]
    train, val, test = (images(data, split) for split in SPLITS)
    assert (len(train), len(val), len(test)) == (96, 24, 44)
    assert not train & val
    assert not (train | val) & test
    content = torch.load(file)["train"]
    label_of = {row.numpy().tobytes(): int(label) for row, label in zip(*content, strict=True)}
    for split in ("train", "val"):
        assert [label_of[row.numpy().tobytes()] for row in data.splits[split][0]] == data.splits[split][1].tolist()


def test_the_split_depends_on_the_seed_alone(file):
    one, again, other = (loaded(file, seed=seed, batch_size=size) for seed, size in ((0, 4), (0, 9), (1, 4)))
    assert images(one, "val") == images(again, "val") != images(other, "val")
    assert images(one, "test") == images(other, "test")


@pytest.mark.parametrize(
    ("split", "settings"),
    [("val", {"set_size": 12}), ("test", {"set_size": 13, "val_size": 0.5}), ("val", {"val_size": 0.01})],
)
def test_every_split_must_have_sets(file, split, settings):
    with pytest.raises(UserError, match=f"the {split} split has"):
        loaded(file, **settings)


@pytest.mark.parametrize("attn", ["qkv", "kv", "kv+pos"])
def test_scores_move_with_the_images_unless_the_map_has_positions(attn):
    task = AnomalyTask({"feature_dim": 5, "set_size": 6}, attn=attn, dim=8, depth=2, heads=2, pos_dim=6, dropout=0.3)
    model = opinionated(task.model, seed=0)
    sets, order = torch.randn(3, 6, 5, dtype=torch.float64), torch.tensor([4, 0, 5, 1, 3, 2])
    scores = model(sets)
    assert scores.shape == (3, 6)
    assert torch.allclose(model(sets[:, order]), scores[:, order]) == (attn != "kv+pos")
