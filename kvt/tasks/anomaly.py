"""Set anomaly detection: find the one image of a set that has another class than all others (Borji 2023, §3.2).

>>> features, labels = torch.arange(12.0).unsqueeze(1), torch.arange(12) % 3  # one feature: the row's number
>>> sets, positions = batch = next(iter(SetBatches(features, labels, set_size=4, last=False, batch_size=2)))
>>> sets.squeeze(-1).tolist(), positions.tolist()  # two sets, and the position of the anomaly in each set
([[4.0, 7.0, 0.0, 1.0], [1.0, 3.0, 0.0, 9.0]], [2, 0])
>>> task = AnomalyTask({"feature_dim": 1, "set_size": 4}, attn="kv", dim=8, depth=1, heads=2)
>>> computed = task.compute_metrics(batch)
>>> computed["logits"].shape, computed["loss"].shape  # scores of the 4 images of each set; the loss
(torch.Size([2, 4]), torch.Size([]))
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.transforms.functional import normalize, resize
from tqdm import tqdm

from kvt.data.files import available, optional_path, require_file
from kvt.data.images import ImageSource, open_images
from kvt.data.loader import Batches
from kvt.data.order import derive_seed
from kvt.data.tensor_files import SPLITS, Splits, cache_splits, read_features, read_tensors
from kvt.models import SetScorer
from kvt.models.blocks import Expansion
from kvt.system import UserError, require_choice, require_probability, sha256_of, user_path
from kvt.tasks.base import Classification, Spec
from kvt.tasks.datamodule import TaskData
from kvt.tasks.options import BlockTask
from kvt.tune import MetaParameters

# names of torchvision's classifiers with a linear last layer, in front of which are the features
BACKBONES = [name for name in list_models(module=torchvision.models) if not name.startswith("squeezenet")]
BATCH = 64  # images per batch: so few that the activations of a large transformer fit into a small GPU


class FeatureFile:
    """Image features from the user's file. `LAYOUT` in kvt/data/tensor_files.py shows the form of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = _hash_file(path)
        self.feature_dim = self.load()["train"][0].shape[1]

    def prepare(self) -> None:
        pass

    def load(self) -> Splits:
        return read_features(self.path)


class BackboneFeatures:
    """Image features: inputs of a torchvision classifier's last linear layer.

    Pixels are normalised as in the training of the published weights. An image is resized only if a side is smaller
    than the network accepts, or larger than `crop_size` of the weights' transforms. A grey image gets three equal
    channels. The features are cached in `data_dir/.cache`.
    """

    def __init__(self, images: ImageSource, backbone: str, weights: Path | None, data_dir: Path) -> None:
        require_choice("backbone", backbone, BACKBONES)
        if "test" not in images.splits:
            raise UserError(f"{images.name} has no test split: sets of images need train/<class>/ and test/<class>/")
        self.images, self.backbone, self.weights = images, backbone, weights
        self.published = get_model_weights(backbone).DEFAULT
        self._network = f"{backbone}\n{_hash_file(weights) if weights else f'{self.published} {self.published.url}'}"
        linear = [pair for pair in _meta_model(backbone).named_modules() if isinstance(pair[1], nn.Linear)]
        self._head, self.feature_dim = linear[-1][0], linear[-1][1].in_features
        self.cache = data_dir / ".cache" / f"features-{self._hash(images.key)}.pt"

    def prepare(self) -> None:
        """Unless the features of the images are cached, compute them, on a CUDA GPU if there is one."""
        cache_splits(self.cache, self._compute, read_features)

    @property
    def content(self) -> str:
        return self._hash(self.images.content)  # not a hash of the features, whose last digits differ between machines

    def load(self) -> Splits:
        return read_features(self.cache)

    def preprocess(self, images: Tensor) -> Tensor:
        """Resize and normalise images for the network: uint8 (B, 1 or 3, H, W) → float32 (B, 3, H', W')."""
        transform = self.published.transforms()
        pixels = images.expand(-1, 3, -1, -1).float() / 255
        (largest,), smallest = transform.crop_size, self.published.meta["min_size"]
        size = [max(low, min(side, largest)) for low, side in zip(smallest, pixels.shape[-2:], strict=True)]
        pixels = resize(pixels, size, interpolation=transform.interpolation, antialias=transform.antialias)
        return normalize(pixels, transform.mean, transform.std)

    def model(self) -> nn.Module:
        """Return the network without its last linear layer, in eval mode: (B, 3, H', W') → (B, feature_dim)."""
        model = self._published_model() if self.weights is None else self._own_model(self.weights)
        model.set_submodule(self._head, nn.Identity())
        return model.float().eval()

    def _hash(self, images: str) -> str:
        return hashlib.sha256(f"{self._network}\n{images}".encode()).hexdigest()[:16]

    def _published_model(self) -> nn.Module:
        url, folder = self.published.url, Path(torch.hub.get_dir()) / "checkpoints"
        remedy = f"put {url} into {folder}, or pass a file of your own as weights or features"
        with available(f"{self.published} in {folder}", remedy):
            return get_model(self.backbone, weights=self.published)

    def _own_model(self, path: Path) -> nn.Module:
        model = _meta_model(self.backbone)
        model.set_submodule(self._head, nn.Identity())
        # torchvision sets `transform_input` when it loads weights of GoogLeNet or Inception; no other network reads it
        model.transform_input = True  # type: ignore[assignment]
        state = {key: value for key, value in read_tensors(path).items() if not key.startswith(f"{self._head}.")}
        model.load_state_dict(state, assign=True)
        return model

    @torch.no_grad()  # not inference_mode: its tensors cannot be used in training
    def _compute(self) -> Splits:
        self.images.prepare()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self.model().to(device).to(memory_format=torch.channels_last)
        splits: Splits = {}
        for split in SPLITS:
            images, labels = self.images.load(split)
            name = f"{self.backbone} features of {self.images.name}/{split}"
            features = [
                model(self.preprocess(batch.to(device)).contiguous(memory_format=torch.channels_last)).cpu()
                for batch in tqdm(images.split(BATCH), desc=name, disable=None)
            ]
            splits[split] = (torch.cat(features), labels)
            if not splits[split][0].isfinite().all():
                raise UserError(f"{self.backbone} with {self.weights or self.published}: {split!r} is not finite")
        return splits


def _hash_file(path: Path) -> str:
    require_file(path, "pass the path of another file")
    return sha256_of(path)[:16]


def _meta_model(backbone: str) -> nn.Module:
    with MetaParameters():
        return get_model(backbone)


FeatureSource = FeatureFile | BackboneFeatures
"""A source of features. `content`, a hash that does not depend on paths of files, identifies the features."""


class SetBatches(Batches):
    """Batches of (sets, float32 (B, S, feature_dim); positions of the anomalies in the sets, int64 (B,)).

    >>> labels = torch.tensor([0, 0, 0, 1, 1])
    >>> sets = SetBatches(torch.arange(5.0).view(5, 1), labels, set_size=3, last=True, batch_size=5)
    >>> features, positions = next(iter(sets))
    >>> features[3, 2].tolist(), positions[3].item()
    ([3.0], 2)

    Image r is the anomaly of set r. The other S − 1 images of the set are drawn uniformly, without repetition, from one
    other class. With `shuffle` (training), sets are drawn for each batch with torch's default generator, which
    `Batches` seeds. Without `shuffle`, all sets are drawn once, and depend only on the seed.

    Args:
        features: float32 (images, feature_dim).
        labels: classes of the images, int64 (images,): at least two classes, each with `set_size` − 1 or more images.
        set_size: S, the number of images in a set.
        last: whether the anomaly is last in the set; False: at a random position.
    """

    rows_on_host = True

    def __init__(self, features: Tensor, labels: Tensor, *, set_size: int, last: bool, **settings: Any) -> None:
        super().__init__(features, labels, **settings)
        self.set_size, self.last = set_size, last
        classes, self._class, counts = labels.unique(return_inverse=True, return_counts=True)
        self._members = torch.full((len(classes), int(counts.max())), -1)  # (classes, size of largest), padded with −1
        self._members[torch.arange(counts.max()) < counts.unsqueeze(1)] = self._class.argsort(stable=True)
        self._fixed = None if self.shuffle else self._draw_all()

    def _take(self, rows: Tensor) -> tuple[Tensor, ...]:
        sets, positions = self._draw(rows) if self._fixed is None else (part[rows] for part in self._fixed)
        return self.tensors[0][sets.to(self.tensors[0].device, non_blocking=True)], positions

    def _draw_all(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 1))  # derive_seed(self.seed) seeds `hold_out`
        chunks = [self._draw(rows, generator) for rows in torch.arange(self.rows).split(1024)]
        sets, positions = zip(*chunks, strict=True)
        return torch.cat(sets), torch.cat(positions)

    def _draw(self, rows: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return sets of image indices, (B, S), and the anomalies' positions, (B,); `rows`, (B,), are the anomalies."""
        size, last, each = len(rows), self.set_size - 1, torch.arange(len(rows))
        classes = len(self._members)
        other = (self._class[rows] + torch.randint(1, classes, (size,), generator=generator)) % classes  # (B,)
        members = self._members[other]  # (B, largest)
        keys = torch.rand(members.shape, generator=generator).masked_fill_(members < 0, -1)  # padding is never drawn
        sets = torch.cat([members.gather(1, keys.topk(last).indices), rows.unsqueeze(1)], dim=1)  # (B, S)
        if self.last:
            return sets, torch.full((size,), last)
        positions = torch.randint(self.set_size, (size,), generator=generator)
        sets[:, last], sets[each, positions] = sets[each, positions], rows
        return sets, positions


class SetAnomalies(TaskData):
    """Sets of image features with one anomaly. A batch is (sets, float32 (B, S, feature_dim); positions, int64 (B,)).

    `positions` are the anomalies' indices in their sets. An anomaly is an image of another class than all other images
    of the set. In an epoch, every image of a split is the anomaly of one set. Training sets are drawn anew in every
    epoch, validation and test sets only once.

    Args:
        dataset: cifar100, or another data set that `Images` accepts.
        root: folder of your own images, train/<class>/ and test/<class>/; or hf:NAME, as in `Images`. Replaces dataset.
        backbone: network that computes the features, the name of a torchvision classifier.
        weights: path of your own weights, a state dict of the backbone; default: torchvision's weights, downloaded.
        features: path of a file of features, which replaces images and backbone. Save such a file with
            torch.save({"train": (features, labels), "test": (features, labels)}, file).
        set_size: number of images in a set, including the anomaly.
        anomaly_position: random; or last, as in the public tutorial on which the task is based. The attention kv+pos
            can find a last anomaly by its position alone.
        val_size: fraction of each class's training images that is used for validation.
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
            raise UserError(f"set_size={set_size} must be at least 3: with two images, either may be the anomaly")
        require_choice("anomaly_position", anomaly_position, ("random", "last"))
        if not 0 < val_size < 1:
            raise UserError(f"val_size={val_size} must be above 0 and below 1: the value is a fraction of each class")
        self.set_size, self.last, self.val_size = set_size, anomaly_position == "last", val_size
        self.source: FeatureSource
        if features is None:
            images = open_images(dataset, self.data_dir, optional_path(root))
            self.source = BackboneFeatures(images, backbone, optional_path(weights), self.data_dir)
        elif root or weights:
            raise UserError(f"features={features} replaces images and backbone: drop root and weights")
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
        if isinstance(self.source, BackboneFeatures):
            counts = {split: len(labels) for split, (_, labels) in found.items()}
            self.note_counts(self.source.images.name, **counts)
        features, labels = found["train"]
        held_out = hold_out(labels, self.val_size, derive_seed(self.seed))
        parts = {"train": ~held_out, "val": held_out}
        splits: dict[str, tuple[Tensor, ...]] = {name: (features[rows], labels[rows]) for name, rows in parts.items()}
        splits["test"] = found["test"]
        for split, (_, labels) in splits.items():
            classes, counts = labels.unique(return_counts=True)
            if len(classes) < 2 or counts.min() < self.set_size - 1:
                needs = f"two classes, each with at least {self.set_size - 1} images"
                raise UserError(f"set_size={self.set_size} needs {needs}: the {split} split has {counts.tolist()}")
        return splits

    def make_batches(self, *tensors: Tensor, **settings: Any) -> Batches:
        features, labels = tensors
        return SetBatches(features, labels, set_size=self.set_size, last=self.last, **settings)


def hold_out(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Return a mask that is True for a random `fraction` of every class: labels, int64 (N,) → bool (N,)."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        held_out[members[: round(fraction * len(members))]] = True
    return held_out


class AnomalyTask(BlockTask, Classification):
    """Task of finding the image of another class in a set. The model is `SetScorer`; the default optimiser is Adam.

    A softmax over the scores of the set's images gives the probability that each image is the anomaly.

    Args:
        dropout: dropout probability in features, residual branches, feed-forward networks and the output layer.
    """

    unit = "sets"

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        dim: int = 256,
        depth: int = 4,
        norm: str = "post",
        expansion: Expansion = 2,
        dropout: float = 0.1,
        lr: float = 5e-4,
        warmup: int = 100,
        schedule: str = "cosine",
        smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        rate: dict[str, Any] = {"lr": lr, "warmup": warmup, "schedule": schedule}
        super().__init__(dim=dim, depth=depth, norm=norm, expansion=expansion, dropout=dropout, **rate, **kwargs)
        require_probability(smoothing=smoothing)
        self.smoothing = smoothing
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> SetScorer:
        sizes = {"feature_dim": spec["feature_dim"], "dim": self.options["dim"]}
        return SetScorer(self.attention(spec["set_size"]), **sizes, **self.blocks)
