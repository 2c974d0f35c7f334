"""Sets: what is drawn, and what is fixed."""

import pytest
import torch
from torch import Tensor

from kvt.data.loader import Batches
from kvt.tasks.anomaly import SetBatches

CLASSES, PER_CLASS = 6, (9, 12, 9, 15, 10, 11)
LABELS = torch.arange(CLASSES).repeat_interleave(torch.tensor(PER_CLASS))[torch.randperm(66)] * 3 + 2  # not 0, 1, 2 …
ROWS = torch.arange(66.0).unsqueeze(1)  # an image's only feature is its row


def batches(seed: int = 0, *, shuffle: bool = True, last: bool = False, size: int = 7, **settings: int) -> SetBatches:
    return SetBatches(ROWS, LABELS, set_size=10, last=last, batch_size=size, shuffle=shuffle, seed=seed, **settings)


def rows_of(loader: Batches) -> tuple[Tensor, Tensor]:
    """The images of an epoch, (rows, S), and the anomalies' positions, (rows,)."""
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
    assert shuffle or anomalies.tolist() == list(range(66))
    assert not last or positions.unique().tolist() == [9]
    for images, anomaly in zip(sets, anomalies, strict=True):
        others = images[images != anomaly]
        (label,) = LABELS[others].unique()
        assert label != LABELS[anomaly]
        assert len(others.unique()) == 9


@pytest.fixture(scope="module")
def many() -> tuple[Tensor, Tensor, Tensor]:
    """Sets, positions and anomalies of a hundred epochs."""
    loader, drawn = batches(size=66), []
    for epoch in range(100):
        loader.set_epoch(epoch)
        drawn.append(rows_of(loader))
    sets, positions = (torch.cat(part) for part in zip(*drawn, strict=True))
    return sets, positions, anomalies_of(sets, positions)


def require_uniform(counts: Tensor) -> None:
    """Each within five standard deviations of the mean."""
    mean = counts.float().mean()
    assert (counts - mean).abs().max() < 5 * mean.sqrt(), counts


def test_all_positions_are_equally_likely(many):
    sets, positions, _ = many
    require_uniform(positions.bincount(minlength=10))
    require_uniform((sets == 0).sum(0).float())  # of one image, anomaly or not


def test_other_classes_and_their_images_are_equally_likely(many):
    sets, positions, anomalies = many
    company = LABELS[sets.gather(1, ((positions + 1) % 10).unsqueeze(1)).squeeze(1)]
    for label in LABELS.unique():
        require_uniform(company[LABELS[anomalies] == label].bincount()[LABELS.unique()[LABELS.unique() != label]])
    largest = (LABELS == 3 * 3 + 2).nonzero().squeeze(1)  # 15 images, nine of which are drawn
    with_them = sets[company == 3 * 3 + 2]
    require_uniform(torch.stack([(with_them == row).sum() for row in largest]))


@pytest.mark.parametrize("shuffle", [True, False])
def test_sets_depend_on_the_seed_alone_and_those_of_training_on_the_epoch(shuffle):
    loader, other = (batches(seed, shuffle=shuffle) for seed in (0, 1))
    again = batches(shuffle=shuffle, size=7 if shuffle else 66)  # fixed sets do not depend on the batch size either
    first = rows_of(loader)[0]
    torch.rand(9)  # what else draws does not matter
    assert torch.equal(first, rows_of(again)[0])
    assert not torch.equal(first, rows_of(other)[0])
    loader.set_epoch(1)
    assert torch.equal(first.sort(0).values, rows_of(loader)[0].sort(0).values) != shuffle
