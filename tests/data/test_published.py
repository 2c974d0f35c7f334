"""Known data sets with other numbers of examples than published."""

import pytest

from kvt.data.published import COUNTS, UNPUBLISHED, other_counts
from kvt.tasks import Characters, Images, SentencePairs, SetAnomalies, TaskData

DATA = {name: lambda name=name: Images(name, val_size=6) for name in ("mnist", "fashion_mnist", "cifar10", "cifar100")}
DATA |= {"anomaly": SetAnomalies, "tinyshakespeare": lambda: Characters(length=8), "multi30k": SentencePairs}


@pytest.mark.usefixtures("in_tmp_dir")
@pytest.mark.parametrize("name", DATA)
def test_a_run_on_a_part_of_a_known_data_set_says_so(name, capfd):
    data: TaskData = DATA[name]()
    data.prepare_data()
    for _ in range(2):
        data.setup("fit")
    said, name = data.notes[UNPUBLISHED], name.replace("anomaly", "cifar100")
    assert said.startswith(f"{name} has ")
    assert all(f"in {part} instead of {count:,}" in said for part, count in COUNTS[name].items())
    assert capfd.readouterr().err.count(f"these are not the published data: {said}\n") == 1


@pytest.mark.parametrize("name", [*COUNTS, "pets"])
def test_the_published_numbers_and_other_data_are_not_mentioned(name):
    assert other_counts(name, COUNTS.get(name, {"train": 3})) is None
