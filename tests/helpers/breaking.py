"""A task whose loss is no number once: in one batch, of one process."""

import os
from collections import Counter

from torch import Tensor

from kvt.tasks import ListTask


class Breaking(ListTask):
    """Multiplies one loss, and with it its gradients, by a number that the environment names.

    BREAKS is stage:rank:batch:factor, as in train:1:4:nan; batches of a stage count from 1 over all epochs.
    """

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.batches: Counter[str] = Counter()

    def compute_metrics(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        measured = super().compute_metrics(batch)
        now = self.trainer.state.stage.value
        self.batches[now] += 1
        stage, rank, number, factor = os.environ["BREAKS"].split(":")
        if (now, self.global_rank, self.batches[now]) == (stage, int(rank), int(number)):
            measured["loss"] = measured["loss"] * float(factor)
        return measured
