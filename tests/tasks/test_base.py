"""What all tasks share."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch

import kvt
from kvt.system import UserError
from kvt.tasks import DigitLists, ListTask, Task, TaskData
from kvt.tasks.metrics import Mean, Metric, by_bin


def test_a_nan_is_not_hidden():
    mean = Mean()
    mean.update(torch.tensor(3.0), 3)
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()


def test_means_by_bin_are_those_of_each_bin_alone():
    values, bins = torch.rand(50, dtype=torch.double), torch.randint(4, (50,))
    mean = Mean(6)
    for part in (slice(20), slice(20, 50)):
        mean.update(*by_bin(values[part], bins[part], 6))
    expected = [values[bins == i].mean() for i in range(6)]
    torch.testing.assert_close(mean.compute(), torch.stack(expected), equal_nan=True)


def train(task, data):
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(task, data)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


class Declared(ListTask):
    metrics = (
        *ListTask.metrics,
        Metric("nines", "share of nines", better="less"),
        Metric("nines_of_odd", stages=["val"]),
        Metric("power", how="exp", better="more"),
    )
    monitor = "val/power"

    def compute_metrics(self, batch):
        nines, digits = (batch[0] == 9).float(), batch[0].float().mean()
        pairs = {"nines_of_odd": (nines.sum(), (batch[0] % 2).sum()), "power": digits}
        return super().compute_metrics(batch) | {"nines": nines.mean()} | pairs


class Undirected(Declared):
    monitor = "val/nines_of_odd"


@pytest.fixture
def lists():
    return DigitLists(train_size=64, val_size=16, test_size=16, length=4, batch_size=10)


def test_a_metric_is_the_mean_of_all_predictions_its_exponential_or_a_sum_over_a_sum(lists):
    logged = train(Declared(lists.spec, dim=8, heads=2), lists)
    digits = lists.splits["val"][0].double()
    assert logged["val/nines"] == pytest.approx((digits == 9).double().mean().item())
    assert logged["val/nines_of_odd"] == pytest.approx(((digits == 9).sum() / (digits % 2).sum()).item())
    assert logged["val/power"] == pytest.approx(digits.mean().exp().item(), rel=1e-6)
    assert {"train/nines", "train/power"} <= logged.keys()
    assert "train/nines_of_odd" not in logged


def test_of_the_metric_that_chooses_it_must_be_known_which_way_is_better(lists):
    with pytest.raises(UserError, match=r"monitor is val/nines_of_odd: .* Metric\('nines_of_odd', better=…\)"):
        Undirected(lists.spec)
    assert Declared.monitored().better == "more"


class Bare(Task):
    """The least that a task has to say."""

    def __init__(self, spec, width: int = 3):
        super().__init__()
        self.model = torch.nn.Linear(spec["numbers"], 1)

    def compute_metrics(self, batch):
        return {"loss": (self(batch[0]) - batch[1]).square().mean()}

    def num_predictions(self, batch):
        return len(batch[0])


class Numbers(TaskData):
    def __init__(self):
        super().__init__()
        self.spec = {"numbers": 2}

    def load(self):
        x = torch.randn(96, 2, generator=torch.Generator().manual_seed(self.seed))
        y = x.sum(1, keepdim=True)
        return {"train": (x[:64], y[:64]), "val": (x[64:80], y[64:80]), "test": (x[80:], y[80:])}


def test_a_task_that_says_no_more_than_it_must_is_trained_and_tested(in_tmp_dir):
    paths = {"model": f"{__name__}.Bare", "data": f"{__name__}.Numbers"}
    classes = {section: {"class_path": path, "init_args": {}} for section, path in paths.items()}
    config = kvt.RunConfig(**classes, trainer={"max_epochs": 3, "enable_progress_bar": False})
    result = kvt.train(config)
    assert result.folder == in_tmp_dir / "lightning_logs" / "numbers" / "Bare" / "version_0"
    losses = [row["val/loss"] for row in result.history if "val/loss" in row]
    assert result.metrics["val/loss"] == min(losses)  # the best checkpoint is that of the lowest loss
    assert "predictions_per_second" in result.metrics
    assert "test/loss" in result.metrics


class Sorted(Numbers):
    """Two classes, one after the other in each split."""

    def load(self):
        labels = torch.arange(2).repeat_interleave(32)
        return dict.fromkeys(("train", "val", "test"), (labels.float().unsqueeze(1), labels))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_half_of_the_batches_of_sorted_rows_have_both_classes(split):
    data = Sorted()
    data.setup("fit")
    trainer = SimpleNamespace(
        global_rank=0, world_size=1, overfit_batches=1, strategy=L.pytorch.strategies.SingleDeviceStrategy()
    )
    labels, *_ = (labels for _, labels in data.batches(split, trainer))
    assert 0.2 < labels.float().mean() < 0.8
    assert data.sample(16, split).__next__()[1].unique().tolist() == [0, 1]


def test_predictions_have_the_order_of_the_rows():
    data = Sorted()
    data.setup("predict")
    assert torch.cat([labels for _, labels in data.predict_dataloader()]).diff().min() == 0
