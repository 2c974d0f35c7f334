"""Set anomaly detection: nine images of one class and one of another, find the latter (Borji 2023, §3.2).

>>> positions, labels = torch.tensor([2]), torch.tensor([0, 0, 0, 1, 1])
>>> sets = SetBatches(torch.arange(5.0).view(5, 1), labels, set_size=3, last=True, batch_size=5)
>>> features, target = next(iter(sets))
>>> features[3, 2].tolist(), target[3].item()
([3.0], 2)
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.features import BackboneFeatures, FeatureFile, FeatureSource
from kvt.data.images import open_images
from kvt.data.loader import Batches, derive_seed
from kvt.models import SetScorer
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import user_path
from kvt.tasks.base import Classification, adam_with_cosine
from kvt.tasks.datamodule import Spec, TaskData

POSITIONS = ("random", "last")


class SetBatches(Batches):
    """Batches of sets in which row r is the anomaly of set r: float32 (B, S, width), and where it stands, int64 (B,).

    The other S − 1 images are different ones of one class, which is any but the anomaly's, with equal probability.
    Shuffled, for training, they are drawn anew for each batch, from the random numbers that `Batches` gives it; else
    once, by the seed alone.

    Args:
        features: of the images, float32 (rows, width).
        labels: int64 (rows,); each class has S − 1 images at least.
        set_size: S.
        last: the anomaly stands last, not anywhere.
        settings: those of `Batches`.
    """

    def __init__(self, features: Tensor, labels: Tensor, *, set_size: int, last: bool, **settings: Any) -> None:
        super().__init__(features, labels, **settings)
        self.set_size, self.last = set_size, last
        classes, self._class, counts = labels.unique(return_inverse=True, return_counts=True)
        self._members = torch.full((len(classes), int(counts.max())), -1)  # (classes, most), filled up with −1
        self._members[torch.arange(counts.max()) < counts.unsqueeze(1)] = self._class.argsort(stable=True)
        self._fixed = None if self.shuffle else self._draw_all()

    def _take(self, rows: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        sets, positions = self._draw(rows) if self._fixed is None else (part[rows] for part in self._fixed)
        return self.tensors[0][sets.to(there.device)], positions

    def _draw_all(self) -> tuple[Tensor, Tensor]:
        """The sets of all rows, always the same."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 1))  # not that of the split into rows
        chunks = [self._draw(rows, generator) for rows in torch.arange(self.rows).split(1024)]
        sets, positions = zip(*chunks, strict=True)
        return torch.cat(sets), torch.cat(positions)

    def _draw(self, rows: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The images (B, S) of the sets whose anomalies are `rows` (B,), and where these stand (B,)."""
        size, last, each = len(rows), self.set_size - 1, torch.arange(len(rows))
        classes = len(self._members)
        other = (self._class[rows] + torch.randint(1, classes, (size,), generator=generator)) % classes
        members = self._members[other]  # (B, most)
        keys = torch.rand(members.shape, generator=generator).masked_fill_(members < 0, -1)
        sets = torch.cat([members.gather(1, keys.topk(last).indices), rows.unsqueeze(1)], dim=1)
        if self.last:
            return sets, torch.full((size,), last)
        positions = torch.randint(self.set_size, (size,), generator=generator)
        sets[:, last], sets[each, positions] = sets[each, positions], rows
        return sets, positions


class SetAnomalies(TaskData):
    """Sets of images, by their features, one of another class than the rest: float32 (B, S, width) and int64 (B,).

    An epoch shows every image of a split as the anomaly once. Training draws its company anew each time; the sets of
    validation and test are drawn once, by the seed. Validation holds the same part of every class out of the training
    images. The features are those of a pretrained network, computed once and kept on disk.

    In the public tutorial that the task comes from, the anomaly is the last image of every set. Attention without
    positions cannot make use of that; attention with a position of its map, such as kv+pos, can and does, without a
    look at the images. Hence the anomaly stands anywhere, unless `anomaly_position` asks for the tutorial's sets.

    Args:
        dataset: cifar100, or mnist, fashion_mnist or cifar10.
        root: a folder of your own images instead: train/ and test/ with one sub-folder a class.
        backbone: the network that the features come from, any classifier of torchvision.
        weights: a file of weights of your own, a state dict of the backbone; default: torchvision's, downloaded.
        features: a file of features computed elsewhere, instead of images and backbone:
            torch.save({"train": (features, labels), "test": (features, labels)}, file).
        set_size: images of a set, the anomaly among them.
        anomaly_position: where the anomaly stands: random or last.
        val_size: the part of the training images of each class to validate on.
        batch_size: sets of a batch on one process.
        seed: of the split, the sets, the order of batches and all randomness of training.
        data_dir: the folder where data sets lie, and where features are kept; default: $KVT_DATA_DIR, else ./data.

    Raises:
        UserError: unknown data set or backbone, files that are missing or broken, sizes that do not fit.
    """

    places = ("data_dir", "weights", "features")

    def __init__(
        self,
        dataset: str = "cifar100",
        root: str | None = None,
        backbone: str = "resnet34",
        weights: str | None = None,
        features: str | None = None,
        set_size: int = 10,
        anomaly_position: str = "random",
        val_size: float = 0.1,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        if set_size < 3:
            raise UserError(f"set_size={set_size} must be at least 3: of two images neither is the odd one")
        if anomaly_position not in POSITIONS:
            raise unknown("anomaly_position", anomaly_position, POSITIONS)
        if not 0 < val_size < 1:
            raise UserError(f"val_size={val_size} must be above 0 and below 1: the part of each class to validate on")
        self.set_size, self.last, self.val_size = set_size, anomaly_position == "last", val_size
        self.source = self._open(dataset, root, backbone, weights, features)
        self.save_hyperparameters({"content": self.source.content})  # wherever the files lie

    @property
    def task_name(self) -> str:
        """ "anomaly"."""
        return "anomaly"

    @property
    def spec(self) -> Spec:
        """The width of an image's features, and the number of images in a set."""
        return {"features": self.source.feature_dim, "set_size": self.set_size}

    def prepare_data(self) -> None:
        """Computes the features, once for all runs."""
        if not self.splits:
            self.source.prepare()

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        """Reads features and labels, and holds the validation split out."""
        found = self.source.load()
        features, labels = found["train"]
        held_out = hold_out(labels, self.val_size, derive_seed(self.seed))
        splits = {
            "train": (features[~held_out], labels[~held_out]),
            "val": (features[held_out], labels[held_out]),
            "test": found["test"],
        }
        for split, (_, labels) in splits.items():
            self._require_sets(split, labels)
        return dict(splits)

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        """Batches of sets."""
        features, labels = tensors
        return SetBatches(features, labels, set_size=self.set_size, last=self.last, **settings)

    def _open(
        self, dataset: str, root: str | None, backbone: str, weights: str | None, features: str | None
    ) -> FeatureSource:
        if features is None:
            images = open_images(dataset, self.data_dir, user_path(root) if root else None)
            return BackboneFeatures(images, backbone, user_path(weights) if weights else None, self.data_dir)
        if root or weights:
            raise UserError(f"features={features} need neither images nor a network: leave root and weights out")
        return FeatureFile(user_path(features))

    def _require_sets(self, split: str, labels: Tensor) -> None:
        classes, counts = labels.unique(return_counts=True)
        if len(classes) < 2:
            raise UserError(f"the {split} split has {len(classes)} class: an anomaly is of another class than the rest")
        if (fewest := int(counts.min())) < self.set_size - 1:
            raise UserError(
                f"class {classes[counts.argmin()]} has {fewest} images in the {split} split, too few for "
                f"set_size={self.set_size}: choose a smaller one, or another val_size than {self.val_size}"
            )


def hold_out(labels: Tensor, part: float, seed: int) -> Tensor:
    """Chooses the same part of every class at random: integers (N,) → bool (N,).

    >>> hold_out(torch.tensor([0, 1, 0, 0, 0, 1, 1, 1]), 0.25, seed=0).sum().item()
    2
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: round(part * len(members))]] = True
    return held_out


class AnomalyTask(Classification):
    """Finds the image of another class: `SetScorer`, Adam, cosine schedule with warm-up stepped every batch.

    Probabilities are a softmax of the scores over the images of a set.

    Args:
        spec: of the data; the command line fills it in.
        attn: qkv, kv, kv+pos, qkv+pos, q-kv, k, k+pos, identity, or the import path of a class of your own,
            my_package.my_module.MyAttention.
        attn_kwargs: settings of that attention, such as kv_heads, score, pos.
        dim: width of the model.
        depth: number of layers.
        heads: number of attention heads.
        pos_dim: channels of the map's positional encoding, for the attentions that have one.
        dropout: of features, residual branches, feed-forward networks and head.
        lr: Adam's learning rate.
        warmup: steps of linear warm-up.
    """

    unit = "sets"
    needs = ("features", "set_size")

    def __init__(
        self,
        spec: Mapping[str, Any],
        attn: str = "kv",
        attn_kwargs: AttentionSettings | None = None,
        dim: int = 256,
        depth: int = 4,
        heads: int = 4,
        pos_dim: int = 10,
        dropout: float = 0.1,
        lr: float = 5e-4,
        warmup: int = 100,
    ) -> None:
        super().__init__(spec)
        require_positive(lr=lr, warmup=warmup)
        make_attention = AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=spec["set_size"])
        self.model = SetScorer(make_attention, feature_dim=spec["features"], dim=dim, depth=depth, dropout=dropout)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, and the cosine over all steps of the run."""
        return adam_with_cosine(self)
