"""What all tasks share."""

import lightning as L
import pytest
import torch

import kvt
from kvt.system.errors import UserError
from kvt.tasks import DigitLists, ListTask, Task, TaskData
from kvt.tasks.base import BinnedMean, WeightedMean


def test_a_nan_is_not_hidden():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()


def test_means_by_bin_are_those_of_each_bin_alone():
    values, bins = torch.rand(50, dtype=torch.double), torch.randint(4, (50,))
    mean = BinnedMean(6)
    for part in (slice(20), slice(20, 50)):
        mean.update(values[part], bins[part])
    expected = [values[bins == i].mean() for i in range(6)]
    torch.testing.assert_close(mean.compute(), torch.stack(expected), equal_nan=True)


class Counting(ListTask):
    """Returns a number that it does not say is a metric."""

    def compute_metrics(self, batch):
        return {**super().compute_metrics(batch), "nines": (batch[0] == 9).float().mean()}


def test_a_metric_that_no_name_lists_is_refused_not_dropped():
    data = DigitLists(train_size=64, val_size=16, test_size=16, length=4, batch_size=16)
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(UserError, match=r"'nines', which is not logged: set metric_names = .*'nines'"):
        trainer.fit(Counting(data.spec, dim=8, heads=2), data)
    with_name = type("Named", (Counting,), {"metric_names": (*ListTask.metric_names, "nines")})
    trainer.fit(with_name(data.spec, dim=8, heads=2), data)
    shown = (data.splits["val"][0] == 9).float().mean()
    assert trainer.callback_metrics["val/nines"] == pytest.approx(shown.item())


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
    config = kvt.RunConfig.of(paths, {"trainer": {"max_epochs": 3, "enable_progress_bar": False}})
    result = kvt.train(config)
    assert result.folder == in_tmp_dir / "lightning_logs" / "numbers" / "Bare" / "version_0"
    losses = [row["val/loss"] for row in result.history if "val/loss" in row]
    assert result.metrics["val/loss"] == min(losses)  # the best checkpoint is that of the lowest loss
    assert "predictions_per_second" in result.metrics
    assert "test/loss" in result.metrics
