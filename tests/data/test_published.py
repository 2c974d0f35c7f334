"""Known data sets with other numbers of examples than published."""

import pytest

from kvt.data.published import COUNTS, UNPUBLISHED, other_counts
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig


@pytest.mark.parametrize(
    ("task", "name", "changes"),
    [
        *((name, name, {"val_size": 6}) for name in ("mnist", "fashion_mnist", "cifar10", "cifar100")),
        ("anomaly", "cifar100", {}),
        ("characters", "tinyshakespeare", {"length": 8}),
        ("translation", "multi30k", {}),
    ],
)
def test_a_run_on_a_part_of_a_known_data_set_says_so(in_tmp_dir, capfd, task, name, changes):
    data = KvtCLI(RunConfig.from_name(task).changed(**changes).as_dict()).datamodule
    data.prepare_data()
    for _ in range(2):
        data.setup("fit")
    said = data.notes[UNPUBLISHED]
    assert said.startswith(f"{name} has ")
    assert all(f"in {part} instead of {count:,}" in said for part, count in COUNTS[name].items())
    assert capfd.readouterr().err.count(f"these are not the published data: {said}\n") == 1


@pytest.mark.parametrize("name", [*COUNTS, "pets"])
def test_the_published_numbers_and_other_data_are_not_mentioned(name):
    assert other_counts(name, COUNTS.get(name, {"train": 3})) is None
