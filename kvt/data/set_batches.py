"""Batches of sets: several examples of one class and one of another, the anomaly.

>>> labels = torch.tensor([0, 0, 0, 1, 1])
>>> sets = SetBatches(torch.arange(5.0).view(5, 1), labels, set_size=3, last=True, batch_size=5)
>>> features, positions = next(iter(sets))  # (B, S, feature_dim), (B,)
>>> features[3, 2].tolist(), positions[3].item()
([3.0], 2)
"""

from typing import Any

import torch
from torch import Tensor

from kvt.data.loader import Batches, derive_seed


class SetBatches(Batches):
    """Batches of sets, float32 (B, S, feature_dim), and the positions of their anomalies, int64 (B,).

    Row r is the anomaly of set r. The other S − 1 images are different images of one other class, drawn uniformly.
    Shuffled, for training, the sets of each batch are drawn from torch's default generator, which `Batches` seeds;
    otherwise all sets are drawn once, from the seed alone.

    Each class of `labels`, int64 (rows,), has at least S − 1 = `set_size` − 1 rows of `features`, (rows, feature_dim).
    `last` puts the anomaly last, not at a random position.
    """

    def __init__(self, features: Tensor, labels: Tensor, *, set_size: int, last: bool, **settings: Any) -> None:
        super().__init__(features, labels, **settings)
        self.set_size, self.last = set_size, last
        classes, self._class, counts = labels.unique(return_inverse=True, return_counts=True)
        self._members = torch.full((len(classes), int(counts.max())), -1)  # (classes, largest), padded with −1
        self._members[torch.arange(counts.max()) < counts.unsqueeze(1)] = self._class.argsort(stable=True)
        self._fixed = None if self.shuffle else self._draw_all()

    def _take(self, rows: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        sets, positions = self._draw(rows) if self._fixed is None else (part[rows] for part in self._fixed)
        return self.tensors[0][sets.to(there.device)], positions

    def _draw_all(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 1))  # stream 0 splits the data
        chunks = [self._draw(rows, generator) for rows in torch.arange(self.rows).split(1024)]
        sets, positions = zip(*chunks, strict=True)
        return torch.cat(sets), torch.cat(positions)

    def _draw(self, rows: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw the sets whose anomalies are `rows` (B,): rows of images (B, S) and the anomalies' positions (B,)."""
        size, last, each = len(rows), self.set_size - 1, torch.arange(len(rows))
        classes = len(self._members)
        other = (self._class[rows] + torch.randint(1, classes, (size,), generator=generator)) % classes  # (B,)
        members = self._members[other]  # (B, largest)
        keys = torch.rand(members.shape, generator=generator).masked_fill_(members < 0, -1)  # never draw padding
        sets = torch.cat([members.gather(1, keys.topk(last).indices), rows.unsqueeze(1)], dim=1)  # (B, S)
        if self.last:
            return sets, torch.full((size,), last)
        positions = torch.randint(self.set_size, (size,), generator=generator)
        sets[:, last], sets[each, positions] = sets[each, positions], rows
        return sets, positions
