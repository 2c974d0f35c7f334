"""The best checkpoint is the one after the last epoch that none before it beats, and the one that is tested."""

from math import nan

import pytest
import torch

from kvt.tasks import ListTask
from kvt.tasks.metrics import Metric
from tests.conftest import SMALL, slow
from tests.helpers.runs import checkpoint


class Told(ListTask):
    """Is told its validation metric of each epoch; its weights know their epoch, which is their accuracy in a test."""

    monitor = "val/told"
    metrics = (*ListTask.metrics, Metric("told", better="more"))
    told = (0.0,)

    def __init__(self, spec, attn="kv", dim=16):
        super().__init__(spec, attn=attn, dim=dim)
        self.register_buffer("epoch_of_weights", torch.tensor(-1.0))

    def on_train_epoch_start(self):
        self.epoch_of_weights.fill_(self.current_epoch)

    def compute_metrics(self, batch):
        measured = super().compute_metrics(batch)
        measured["told"] = torch.tensor(0.0)
        if self.trainer.validating:
            measured["told"] = torch.tensor(self.told[self.current_epoch])
        return measured | ({"acc": self.epoch_of_weights} if self.trainer.testing else {})


class ToldLess(Told):
    metrics = (*ListTask.metrics, Metric("told", better="less"))


@pytest.mark.parametrize(
    ("told", "best"),
    [
        ([0, 0, 0], {"more": 2, "less": 2}),
        ([1, 2, 2, 1], {"more": 2, "less": 3}),
        *slow(
            ([1, 0.5, 1, 0.5, 0.75], {"more": 2, "less": 3}),
            ([0.5, nan, nan], {"more": 0, "less": 0}),
            ([nan, 0.5, 0.5, nan], {"more": 2, "less": 2}),
            ([nan, nan], {"more": 0, "less": 0}),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [Told, ToldLess])
def test_of_equal_epochs_the_last_is_kept_and_tested(experiment, monkeypatch, cls, told, best):
    monkeypatch.setattr(Told, "told", told)
    words = ["--model", f"{__name__}.{cls.__name__}", *SMALL["reverse"], "--max_epochs", str(len(told))]
    result = experiment("reverse", *words)
    assert checkpoint(result["path"].parent, "best")["epoch"] == best[cls.monitored().better]
    assert result["test/acc"] == best[cls.monitored().better]
