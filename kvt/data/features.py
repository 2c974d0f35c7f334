"""Features of images: computed once by a pretrained network, or read from a file."""

import hashlib
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.transforms.functional import normalize, resize
from tqdm import tqdm

from kvt.data.download import network
from kvt.data.images import ImageSource
from kvt.data.tensor_files import SPLITS, Splits, cache_splits, read_features, read_tensors
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file, sha256_of
from kvt.system.hardware import MetaParameters

BACKBONES = list_models(module=torchvision.models)  # the classifiers
BATCH = 64  # images; a large transformer's activations then fit into a small GPU


class FeatureFile:
    """Features computed elsewhere, in the layout that `read_features` reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = _hash_file(path)
        self.feature_dim = self.load()["train"][0].shape[1]

    def prepare(self) -> None:
        pass

    def load(self) -> Splits:
        return read_features(self.path)


class BackboneFeatures:
    """The inputs of the last linear layer of a torchvision classifier, such as the 512 numbers of ResNet-34.

    Pixels are normalised as for the published weights. An image keeps its size, each side clamped between the smallest
    that the network accepts and the one it was trained on; a grey image gets three equal channels. The features are
    cached in `data_dir/.cache` under a hash of backbone, weights and data set.
    """

    def __init__(self, images: ImageSource, backbone: str, weights: Path | None, data_dir: Path) -> None:
        if backbone not in BACKBONES:
            raise unknown("backbone", backbone, BACKBONES)
        self.images, self.backbone, self.weights = images, backbone, weights
        self.published = get_model_weights(backbone).DEFAULT
        self._network = f"{backbone}\n{_hash_file(weights) if weights else f'{self.published} {self.published.url}'}"
        linear = [pair for pair in _meta_model(backbone).named_modules() if isinstance(pair[1], nn.Linear)]
        if not linear:
            raise UserError(f"{backbone} has no linear layer to take features from: choose another, such as resnet34")
        self._head, self.feature_dim = linear[-1][0], linear[-1][1].in_features
        self.cache = data_dir / ".cache" / f"features-{self._hash(images.key)}.pt"

    def prepare(self) -> None:
        """Compute the features of all images, on a GPU if there is one, unless they are cached."""
        cache_splits(self.cache, self._compute, read_features)

    @property
    def content(self) -> str:
        return self._hash(self.images.content)  # not of the features, which differ between machines in the last digit

    def load(self) -> Splits:
        """Return the features and labels as `read_features` does."""
        return read_features(self.cache)

    def preprocess(self, images: Tensor) -> Tensor:
        """uint8 (B, 1 or 3, H, W) → float32 (B, 3, H', W')."""
        transform = self.published.transforms()
        pixels = images.expand(-1, 3, -1, -1).float() / 255
        (largest,), smallest = transform.crop_size, self.published.meta["min_size"]
        size = [max(low, min(side, largest)) for low, side in zip(smallest, pixels.shape[-2:], strict=True)]
        pixels = resize(pixels, size, interpolation=transform.interpolation, antialias=transform.antialias)
        return normalize(pixels, transform.mean, transform.std)

    def model(self) -> nn.Module:
        """Return the network without its last linear layer, in eval mode: output of `preprocess` → (B, feature_dim)."""
        model = self._published_model() if self.weights is None else self._own_model(self.weights)
        model.set_submodule(self._head, nn.Identity())
        return model.float().eval()

    def _hash(self, images: str) -> str:
        return hashlib.sha256(f"{self._network}\n{images}".encode()).hexdigest()[:16]

    def _published_model(self) -> nn.Module:
        url, folder = self.published.url, Path(torch.hub.get_dir()) / "checkpoints"
        remedy = f"put {url} into {folder}, or give --weights FILE or --features FILE"
        with network(f"{self.published} are missing or broken in {folder}", remedy):
            return get_model(self.backbone, weights=self.published)

    def _own_model(self, path: Path) -> nn.Module:
        model = _meta_model(self.backbone)
        model.set_submodule(self._head, nn.Identity())
        # As torchvision does for its weights of GoogLeNet and Inception; no other network reads the attribute.
        model.transform_input = True  # type: ignore[assignment]
        try:
            state = read_tensors(path)
            for key in [key for key in state if key.startswith(f"{self._head}.")]:
                del state[key]
            model.load_state_dict(state, assign=True)
        except Exception as error:  # of many types: the file may hold anything
            reason = str(error).strip().rpartition("\n")[2].strip()
            message = f"--weights {path} does not fit {self.backbone} ({reason:.100})"
            raise UserError(f"{message}: save its model.state_dict() with torch.save") from error
        return model

    @torch.no_grad()  # not inference_mode, whose tensors could not be trained on
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
        return splits


def _hash_file(path: Path) -> str:
    require_file(path, "name another file")
    return sha256_of(path)[:16]


def _meta_model(backbone: str) -> nn.Module:
    with MetaParameters():
        return get_model(backbone)


FeatureSource = FeatureFile | BackboneFeatures
"""A source of features. It has `feature_dim` and `content`, a hash that does not depend on where their files lie."""
