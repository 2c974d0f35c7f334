"""Features of images: those of a pretrained network, computed once, or a file of them."""

import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.transforms.functional import normalize, resize
from tqdm import tqdm

from kvt.data.download import Remote, fetch, is_sound, network
from kvt.data.image_source import ImageSource
from kvt.data.tensor_cache import if_kept, make_once
from kvt.data.tensor_files import Splits, has_values, load, read_features
from kvt.system.errors import UserError, unknown
from kvt.system.files import require_file
from kvt.system.memory import WithoutMemory, require_memory

BACKBONES = list_models(module=torchvision.models)
"""The classifiers of torchvision."""
TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
BATCH = 64  # images: a large transformer's activations fit into a small GPU


class FeatureSource(ABC):
    """Where image features come from.

    `width` and `content` (tells these features from others, wherever files lie) are known at once.
    """

    width: int
    content: str

    @abstractmethod
    def prepare(self) -> None:
        """Computes whatever `load` needs, once; harmless to repeat, to race and to kill.

        Raises UserError for images or weights that are missing or broken, and results that cannot be stored.
        """

    @abstractmethod
    def load(self) -> Splits:
        """Features, float32 (N, width), and labels, int64 (N,), of "train" and "test", after `prepare`."""


class FeatureFile(FeatureSource):
    """Features computed elsewhere: torch.save({"train": (features, labels), "test": (features, labels)}, path).

    Features are of any floating type, (N, width), and finite; labels are integers, (N,), none below zero. Raises
    UserError, naming the file, for whatever is amiss with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = _hash_file(path)
        self.width = read_features(path)["train"][0].shape[1]

    def prepare(self) -> None:
        """Nothing is left to do."""

    def load(self) -> Splits:
        """See `FeatureSource.load`."""
        return read_features(self.path)


class BackboneFeatures(FeatureSource):
    """What enters the last linear layer of a torchvision classifier, ResNet-34's 512 numbers for one.

    The network sees pixels normalised as its published weights ask for. An image keeps its own size, each side brought
    between the least that the network takes and the one that it was trained on; grey images get three equal channels.
    The features are kept in `data_dir/.cache` under the hash of backbone, weights and data set; that folder may be
    deleted at any time. Raises UserError for an unknown backbone, one without a linear layer, and a file of weights
    that cannot be read.

    Args:
        images: the data set.
        backbone: one of `BACKBONES`.
        weights: a file that holds a state dict of it; default: those of torchvision, downloaded to where it keeps them.
        data_dir: the folder where data sets lie.
    """

    def __init__(self, images: ImageSource, backbone: str, weights: Path | None, data_dir: Path) -> None:
        if backbone not in BACKBONES:
            raise unknown("backbone", backbone, BACKBONES)
        self.images, self.backbone, self.weights, self.data_dir = images, backbone, weights, data_dir
        self.published = get_model_weights(backbone).DEFAULT
        self.content = _hash_file(weights) if weights else f"{self.published} {self.published.url}"
        self._head, linear = _last_linear(backbone, _without_weights(backbone))
        self.width = linear.in_features
        key = "\n".join((backbone, self.content, images.fingerprint))
        self.cache = data_dir / ".cache" / f"features-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"

    def prepare(self) -> None:
        """Computes the features of all images, on a GPU if there is one, unless they are there."""
        if not if_kept(self._kept):
            self.images.prepare()  # first: it holds the lock of the data folder too
            make_once(self.cache, self.data_dir, self._compute, self._kept)

    def load(self) -> Splits:
        """See `FeatureSource.load`."""
        return if_kept(self._kept) or self._compute()  # the latter within `read_only`

    def _kept(self) -> Splits:
        return read_features(self.cache, self.width)

    def size(self, height: int, width: int) -> list[int]:
        """Height and width that an image of this size is brought to."""
        (most,) = self.published.transforms().crop_size
        least = self.published.meta["min_size"]
        return [max(low, min(side, most)) for low, side in zip(least, (height, width), strict=True)]

    def preprocess(self, images: Tensor) -> Tensor:
        """uint8 (B, 1 or 3, H, W) → float32 (B, 3, H', W')."""
        asked = self.published.transforms()
        pixels = images.expand(-1, 3, -1, -1).float() / 255
        size = self.size(*pixels.shape[-2:])
        pixels = resize(pixels, size, interpolation=asked.interpolation, antialias=asked.antialias)
        return normalize(pixels, asked.mean, asked.std)

    def model(self) -> nn.Module:
        """The network without its last linear layer, in eval mode: what `preprocess` returns → (B, width).

        Raises:
            UserError: weights that cannot be downloaded, read or fitted in.
        """
        model = self._download() if self.weights is None else self._read(self.weights)
        return model.float().eval()

    def _download(self) -> nn.Module:
        url, folder = self.published.url, Path(torch.hub.get_dir()) / "checkpoints"
        path, size = folder / url.rpartition("/")[2], (self.published.meta["_file_size"] + 0.001) * 2**20
        remote = Remote(url, path.stem.rpartition("-")[2], ceil(size))  # …/resnet34-b627a593.pth
        remedy = f"put {url} into {folder}, or give --weights FILE or --features FILE"
        with network(f"{self.published} are missing or broken in {folder}", remedy):
            folder.mkdir(parents=True, exist_ok=True)
            if not is_sound(path, remote):
                fetch(remote, path)
        try:
            with _tensors_only():
                return self._without_head(get_model(self.backbone, weights=self.published))
        except Exception as error:  # a broken pickle raises nearly anything
            raise UserError(f"{path} holds no weights of {self.backbone}: remove it") from error

    def _read(self, path: Path) -> nn.Module:
        model = self._without_head(_without_weights(self.backbone))
        # As torchvision does for the published weights of GoogLeNet and Inception; no other network looks at it.
        model.transform_input = True  # type: ignore[assignment]
        state = _read_weights(path)
        for key in [key for key in state if key.startswith(f"{self._head}.")]:
            del state[key]
        try:
            for key, tensor in model.state_dict().items():
                if key in state and state[key].is_floating_point() != tensor.is_floating_point():
                    raise TypeError(f"{key} is {state[key].dtype}")
            model.load_state_dict(state, assign=True)
            return model.float()
        except Exception as error:  # what a state dict says besides is of any type
            reason = str(error).rpartition("\n")[2].strip()
            message = f"--weights {path} does not fit {self.backbone} ({reason:.100}): name weights of it"
            raise UserError(message) from error

    def _without_head(self, model: nn.Module) -> nn.Module:
        model.set_submodule(self._head, nn.Identity())
        return model

    @torch.no_grad()  # not inference_mode: a model may be trained on what this returns
    def _compute(self) -> Splits:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self.model().to(device).to(memory_format=torch.channels_last)
        splits: Splits = {}
        for split in ("train", "test"):
            images, labels = self.images.load(split)
            what, found = f"{self.backbone} features of {self.images.name}/{split}", []
            for part in tqdm(images.split(BATCH), desc=what, disable=None):
                pixels = self.preprocess(part.to(device)).contiguous(memory_format=torch.channels_last)
                found.append(model(pixels).cpu())
            splits[split] = (torch.cat(found), labels)
            if not splits[split][0].isfinite().all():
                whose = self.weights or self.published
                raise UserError(f"{whose}: the {what} are infinite or not a number: give --weights of another file")
        return splits


def _read_weights(path: Path) -> dict[str, Tensor]:
    require_memory(require_file(path, "name another file").st_size, f"--weights {path}")
    try:
        state = load(path, or_old=True)
    except Exception as error:  # a broken pickle raises nearly anything
        reason = "is no readable file of weights: save it with torch.save, tensors only"
        raise UserError(f"--weights {path} {reason}") from error
    if not (
        isinstance(state, dict)
        and all(isinstance(key, str) for key in state)
        and all(isinstance(value, Tensor) and has_values(value) for value in state.values())
    ):
        raise UserError(f"--weights {path} is no state dict of dense tensors: save model.state_dict() there")
    return state


def _hash_file(path: Path) -> str:
    """Tells one file's content from another's."""
    require_file(path, "name another file")
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name a readable file") from error


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Lets torch.load run no code, whoever calls it: torchvision asks for any pickle."""
    before = os.environ.get(TENSORS_ONLY)
    os.environ[TENSORS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TENSORS_ONLY]
        else:
            os.environ[TENSORS_ONLY] = before


def _without_weights(backbone: str) -> nn.Module:
    """The network with its parameters' shapes alone."""
    with WithoutMemory(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # how two of them would be initialised
        return get_model(backbone)


def _last_linear(backbone: str, model: nn.Module) -> tuple[str, nn.Linear]:
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"{backbone} has no linear layer to take features from: choose another, such as resnet34")
    return linear[-1]
