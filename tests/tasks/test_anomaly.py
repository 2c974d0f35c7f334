"""Sets of images: what is drawn, what is fixed, and the leak of the tutorial."""

import lightning as L
import pytest
import torch
from torch import Tensor

from kvt.attention import ATTENTION, AttentionFactory
from kvt.data.loader import Batches
from kvt.models import SetScorer
from kvt.system.errors import UserError
from kvt.tasks import AnomalyTask, SetAnomalies
from kvt.tasks.anomaly import SetBatches, hold_out
from tests.conftest import write_features
from tests.helpers.small_models import opinionated

CLASSES, PER_CLASS = 6, (9, 12, 9, 15, 10, 11)
LABELS = torch.arange(CLASSES).repeat_interleave(torch.tensor(PER_CLASS))[torch.randperm(66)] * 3 + 2  # not 0, 1, 2 …
ROWS = torch.arange(66.0).unsqueeze(1)  # an image's only feature is its row
SPLITS = ("train", "val", "test")


def batches(seed: int = 0, *, shuffle: bool = True, last: bool = False, size: int = 7, **settings: int) -> SetBatches:
    return SetBatches(ROWS, LABELS, set_size=10, last=last, batch_size=size, shuffle=shuffle, seed=seed, **settings)


def rows_of(loader: Batches) -> tuple[Tensor, Tensor]:
    """The images (rows, S) of a pass, and where the anomalies stand (rows)."""
    features, positions = zip(*loader, strict=True)
    return torch.cat(features).squeeze(-1).long(), torch.cat(positions)


def anomalies_of(sets: Tensor, positions: Tensor) -> Tensor:
    return sets.gather(1, positions.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_set_has_nine_of_one_class_and_one_of_another(shuffle, last):
    sets, positions = rows_of(batches(shuffle=shuffle, last=last))
    anomalies = anomalies_of(sets, positions)
    assert sets.shape == (66, 10)
    assert anomalies.sort().values.tolist() == list(range(66))  # each image once
    for images, anomaly in zip(sets, anomalies, strict=True):
        others = images[images != anomaly]
        (label,) = LABELS[others].unique()
        assert label != LABELS[anomaly]
        assert len(others.unique()) == 9


def test_in_order_the_anomalies_are_in_order():
    assert anomalies_of(*rows_of(batches(shuffle=False))).tolist() == list(range(66))


def many(last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sets, positions and anomalies of a hundred epochs."""
    loader, drawn = batches(last=last, size=66), []
    for epoch in range(100):
        loader.set_epoch(epoch)
        drawn.append(rows_of(loader))
    sets, positions = (torch.cat(part) for part in zip(*drawn, strict=True))
    return sets, positions, anomalies_of(sets, positions)


def require_uniform(counts: Tensor) -> None:
    """Each within five standard deviations of the mean."""
    mean = counts.float().mean()
    assert (counts - mean).abs().max() < 5 * mean.sqrt(), counts


def test_the_anomaly_stands_anywhere():
    sets, positions, _ = many(last=False)
    require_uniform(positions.bincount(minlength=10))
    assert 9 in positions[:66]
    # wherever it stands, of a class with nine images each is anywhere else
    require_uniform(((sets == 0).sum(0)).float())


def test_the_anomaly_stands_last():
    _, positions, _ = many(last=True)
    assert positions.unique().tolist() == [9]


def test_other_classes_and_their_images_are_equally_likely():
    sets, positions, anomalies = many(last=False)
    company = LABELS[sets.gather(1, ((positions + 1) % 10).unsqueeze(1)).squeeze(1)]
    for label in LABELS.unique():
        require_uniform(company[LABELS[anomalies] == label].bincount()[LABELS.unique()[LABELS.unique() != label]])
    largest = (LABELS == 3 * 3 + 2).nonzero().squeeze(1)  # 15 images, nine of which are drawn
    with_them = sets[company == 3 * 3 + 2]
    require_uniform(torch.stack([(with_them == row).sum() for row in largest]))


@pytest.mark.parametrize("size", [1, 7, 66])
def test_sets_that_are_fixed_depend_on_the_seed_alone(size):
    expected = rows_of(batches(shuffle=False))
    torch.manual_seed(size)
    loader = batches(shuffle=False, size=size)
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        for part, same in zip(rows_of(loader), expected, strict=True):
            assert torch.equal(part, same)
    assert not torch.equal(rows_of(batches(1, shuffle=False))[0], expected[0])


def test_fixed_sets_of_two_processes_are_those_of_one():
    sets, positions = rows_of(batches(shuffle=False, size=6))
    parts = [batches(shuffle=False, size=6, rank=rank, world_size=2) for rank in (0, 1)]
    for rank, part in enumerate(parts):
        of_it, where = rows_of(part)
        mine = torch.cat(torch.arange(66).split(6)[rank::2])
        assert torch.equal(of_it, sets[mine])
        assert torch.equal(where, positions[mine])


def test_training_sets_are_drawn_anew_each_epoch_by_the_seed():
    loader, again, other = batches(), batches(), batches(1)
    first = rows_of(loader)[0]
    torch.rand(9)  # what else draws does not matter
    assert torch.equal(first, rows_of(again)[0])
    assert not torch.equal(first, rows_of(other)[0])
    loader.set_epoch(1)
    assert not torch.equal(first.sort(0).values, rows_of(loader)[0].sort(0).values)


@pytest.mark.parametrize("stop", [0, 4, 9])
def test_training_goes_on_in_the_middle_of_an_epoch(stop):
    whole = batches()
    whole.set_epoch(2)
    expected = list(whole)
    begun = batches()
    begun.set_epoch(2)
    for batch, _ in zip(range(10), begun, strict=True):
        if batch == stop:
            break
    resumed = batches()
    resumed.load_state_dict(begun.state_dict())
    torch.rand(5)
    rest = list(resumed)
    assert len(rest) == (10 - stop - 1 or 10)
    if stop < 9:
        for batch, same in zip(rest, expected[stop + 1 :], strict=True):
            assert all(torch.equal(part, other) for part, other in zip(batch, same, strict=True))


# ---- the splits ----------------------------------------------------------------------------------


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


def test_each_class_gives_its_part():
    labels = torch.tensor([5] * 10 + [1] * 20 + [3] * 5)[torch.randperm(35)]
    held_out = hold_out(labels, 0.2, seed=0)
    assert labels[held_out].bincount().tolist() == [0, 4, 0, 1, 0, 2]


def test_the_model_is_told_before_the_data_are_read(file):
    assert SetAnomalies(features=file, set_size=5).spec == {"features": 8, "set_size": 5}


def test_loaders_serve_sets_of_features(file):
    data = loaded(file, batch_size=6)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        features, positions = next(iter(loader))
        assert (features.shape, features.dtype) == ((6, 4, 8), torch.float32)
        assert (positions.shape, positions.dtype) == ((6,), torch.int64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"set_size": 12}, "class 0 has 3 images in the val split, too few for set_size=12"),
        ({"set_size": 13, "val_size": 0.5}, "class 0 has 11 images in the test split"),
        ({"set_size": 5, "val_size": 0.95}, "class 0 has 2 images in the train split"),
        ({"val_size": 0.01}, "class 0 has 0 images|the val split has 0 class"),
    ],
)
def test_every_split_must_have_sets(file, settings, words):
    with pytest.raises(UserError, match=words):
        loaded(file, **settings)


def test_one_class_has_no_anomaly(tmp_path):
    write_features(tmp_path / "one.pt", classes=1, width=8)
    with pytest.raises(UserError, match="has 1 class:"):
        loaded(str(tmp_path / "one.pt"))


# ---- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ATTENTION)
def test_scores_move_with_the_images_but_for_attention_with_positions(attn):
    make = AttentionFactory(attn, heads=2, max_len=6, pos_dim=6)
    model = opinionated(SetScorer(make, feature_dim=5, dim=8, depth=2, dropout=0.3), seed=0)
    sets, order = torch.randn(3, 6, 5, dtype=torch.float64), torch.tensor([4, 0, 5, 1, 3, 2])
    scores = model(sets)
    assert scores.shape == (3, 6)
    assert torch.allclose(model(sets[:, order]), scores[:, order]) == (not attn.endswith("+pos"))


def test_features_are_dropped_while_training_only():
    model = SetScorer(AttentionFactory("kv", heads=2), feature_dim=5, dim=8, depth=1, dropout=0.5)
    seen: list[Tensor] = []
    model.embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ones = torch.ones(8, 6, 5)
    model(ones)
    model.eval()(ones)
    assert 0.3 < (seen[0] == 0).float().mean() < 0.7
    assert torch.equal(seen[1], ones)


# ---- the leak ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> str:
    """Images without a class: there is nothing to detect."""
    path = tmp_path_factory.mktemp("noise") / "noise.pt"
    write_features(path, classes=20, width=16, train=220, test=25)
    return str(path)


@pytest.mark.parametrize("anomaly_position", ["random", "last"])
@pytest.mark.parametrize("attn", ["qkv", "kv", "kv+pos"])
def test_a_map_with_positions_finds_the_last_image_without_a_look(noise, attn, anomaly_position):
    """Chance is one in ten, for all but kv+pos on the sets of the tutorial."""
    if (attn, anomaly_position) == ("kv+pos", "last"):  # learns early with most seeds, with some it takes long
        assert any(accuracy_on(noise, attn, anomaly_position, seed) > 0.5 for seed in (6, 0, 1, 2))
    else:
        accuracy = accuracy_on(noise, attn, anomaly_position, seed=6)
        assert abs(accuracy - 0.1) < 0.06  # 500 sets: a standard deviation is 0.013


def accuracy_on(features: str, attn: str, anomaly_position: str, seed: int) -> float:
    L.seed_everything(seed, verbose=False)
    data = SetAnomalies(features=features, anomaly_position=anomaly_position, seed=seed)
    task = AnomalyTask(data.spec, attn=attn, dim=64, depth=1, heads=4, pos_dim=50, dropout=0.0, lr=3e-3, warmup=20)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(max_steps=300, accelerator="cpu", limit_val_batches=0, gradient_clip_val=2, **quiet)
    trainer.fit(task, data)
    (result,) = trainer.test(task, data, verbose=False)
    return result["test/acc"]
