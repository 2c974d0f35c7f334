"""Set anomaly detection: nine images of one class and one of another, find the latter (Borji 2023, §3.2).

>>> task = AnomalyTask({"feature_dim": 5, "set_size": 10}, dim=8, depth=1, heads=2)
>>> task(torch.randn(3, 10, 5)).shape  # (B, S, feature_dim) → one score for each image, (B, S)
torch.Size([3, 10])
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvt.attention import AttentionFactory, AttentionSettings
from kvt.data.features import BackboneFeatures, FeatureFile, FeatureSource
from kvt.data.images import open_images
from kvt.data.loader import Batches, SetBatches
from kvt.data.order import derive_seed
from kvt.models import SetScorer
from kvt.system.errors import UserError, require_positive, unknown
from kvt.system.files import optional_path, user_path
from kvt.tasks.base import Classification
from kvt.tasks.datamodule import TaskData
from kvt.tasks.schedules import with_cosine


class SetAnomalies(TaskData):
    """Sets of image features with one image of another class: float32 (B, S, feature_dim) and its position, int64 (B,).

    In an epoch every image of a split is the anomaly once. Training sets are drawn anew each time, the sets of
    validation and test once, from the seed. The features are computed once by a pretrained network and kept on disk.

    Args:
        dataset: cifar100, or any other set of `Images`.
        root: a folder of your own images instead: train/ and test/ with one sub-folder per class; or hf:NAME, a data
            set of Hugging Face.
        backbone: the network that computes the features, any classifier of torchvision.
        weights: a file of your own weights, a state dict of the backbone; default: torchvision's, downloaded.
        features: a file of features computed elsewhere, instead of images and backbone:
            torch.save({"train": (features, labels), "test": (features, labels)}, file).
        set_size: images of a set, including the anomaly.
        anomaly_position: random, or last as in the public tutorial, where kv+pos finds it without looking at images.
        val_size: the fraction of the training images of each class to validate on.
    """

    task_name = "anomaly"
    path_settings = ("data_dir", "root", "weights", "features")

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
            raise UserError(f"set_size={set_size} must be at least 3: in a set of two, neither image is the anomaly")
        if anomaly_position not in ("random", "last"):
            raise unknown("anomaly_position", anomaly_position, ("random", "last"))
        if not 0 < val_size < 1:
            raise UserError(f"val_size={val_size} must be above 0 and below 1: a fraction of each class")
        self.set_size, self.last, self.val_size = set_size, anomaly_position == "last", val_size
        self.source: FeatureSource
        if features is None:
            images = open_images(dataset, self.data_dir, optional_path(root))
            self.source = BackboneFeatures(images, backbone, optional_path(weights), self.data_dir)
        elif root or weights:
            raise UserError(f"features={features} replaces images and network: drop --root and --weights")
        else:
            self.source = FeatureFile(user_path(features))
        self.spec = {"feature_dim": self.source.feature_dim, "set_size": set_size}

    @classmethod
    def chance(cls, set_size: int = 10, **settings: Any) -> float:
        return 1 / set_size

    def prepare_data(self) -> None:
        if not self.splits:
            self.source.prepare()

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        found, self.content = self.source.load(), self.source.content
        features, labels = found["train"]
        held_out = hold_out(labels, self.val_size, derive_seed(self.seed))
        parts = {"train": ~held_out, "val": held_out}
        splits: dict[str, tuple[Tensor, ...]] = {name: (features[rows], labels[rows]) for name, rows in parts.items()}
        splits["test"] = found["test"]
        for split, (_, labels) in splits.items():
            classes, counts = labels.unique(return_counts=True)
            if len(classes) < 2:
                raise UserError(f"the {split} split has {len(classes)} class: anomalies need at least two")
            if (fewest := int(counts.min())) < self.set_size - 1:
                raise UserError(
                    f"class {classes[counts.argmin()]} has {fewest} images in the {split} split, too few for "
                    f"set_size={self.set_size}: choose a smaller one, or another val_size than {self.val_size}"
                )
        return splits

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        features, labels = tensors
        return SetBatches(features, labels, set_size=self.set_size, last=self.last, **settings)


def hold_out(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Choose the same fraction of every class at random: int64 (N,) → bool (N,)."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: round(fraction * len(members))]] = True
    return held_out


class AnomalyTask(Classification):
    """Finds the image of another class by a softmax over the set: `SetScorer`, Adam, cosine schedule with warm-up.

    Args:
        dropout: of features, residual branches, feed-forward networks and head.
    """

    unit = "sets"
    required_spec = ("feature_dim", "set_size")
    configure_optimizers = with_cosine

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
        self.lr, self.warmup = lr, warmup
        make_attention = AttentionFactory(attn, attn_kwargs, heads=heads, pos_dim=pos_dim, max_len=spec["set_size"])
        self.model = SetScorer(make_attention, feature_dim=spec["feature_dim"], dim=dim, depth=depth, dropout=dropout)
