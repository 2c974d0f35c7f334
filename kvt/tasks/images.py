"""Image classification: MNIST, FashionMNIST, CIFAR-10, CIFAR-100 or your own images (Borji 2023, §3.2).

>>> spec = {"channels": 1, "height": 2, "width": 2, "classes": ["cat", "dog"], "mean": [0.5], "std": [0.25]}
>>> images = torch.tensor([[[[0, 255], [255, 0]]], [[[90, 90], [40, 40]]]], dtype=torch.uint8)  # two: 2x2 pixels each
>>> batch = images, torch.tensor([0, 1])  # a cat and a dog
>>> task = ImageTask(spec, attn="kv", patch=1, dim=8, depth=1, heads=2)
>>> computed = task.compute_metrics(batch)
>>> computed["logits"].shape, task.class_title(1), [metric.name for metric in task.metrics]
(torch.Size([2, 2]), 'dog', ['loss', 'acc'])
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from kvt.data.augment import random_resized_crop_flip
from kvt.data.files import optional_path
from kvt.data.images import SETS, ImageSet, fitted, grey_or_rgb, open_images, read_image
from kvt.data.order import derive_seed
from kvt.models import ViT, count_tokens
from kvt.models.blocks import Expansion
from kvt.system import UserError, printable, require_positive, require_probability, say
from kvt.tasks.base import Classification, Spec
from kvt.tasks.datamodule import TaskData
from kvt.tasks.options import BlockTask

SHAPE = ("channels", "height", "width")


class Images(TaskData):
    __doc__ = f"""Images and their classes. A batch is (images, uint8 (B, C, H, W); classes, int64 (B,)).

    Without a validation split, a random part of the training images, set by the seed, serves as one. With
    `augment`, each training image gets a random resized crop (scale 0.8–1, ratio 0.9–1.1) and a random horizontal flip;
    the result is float32.

    Args:
        dataset: {", ".join(SETS)}.
        root: folder of your own images, with train/, and test/ or val/ or both, each with one subfolder per class; or a
            Hugging Face data set, hf:NAME or hf:NAME:CONFIGURATION, where NAME may be a folder. Replaces `dataset`.
        image_size: for images of your own: pixels per side after scaling and cropping; default: unchanged.
        augment: whether training images are randomly cropped and flipped.
        val_size: number of training images to validate on, or their fraction if below 1. Not used if the images have a
            validation split, such as val/.
        mean: mean of the pixels, scaled to [0, 1], for normalisation: one number for each channel or one for all.
            Default: the mean in the paper's code; with `root`, the mean of the training images.
        std: standard deviation of the pixels, for normalisation; form and default as for `mean`.
    """

    path_settings = ("data_dir", "root")
    measured = ("mean", "std")
    sets: ClassVar[Mapping[str, ImageSet]] = SETS

    def __init__(
        self,
        dataset: str = "cifar10",
        root: str | None = None,
        image_size: int | None = None,
        augment: bool = True,
        val_size: float = 0.1,
        mean: float | list[float] | None = None,
        std: float | list[float] | None = None,
        batch_size: int = 128,
        seed: int = 0,
        data_dir: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, data_dir)
        self.source = open_images(dataset, self.data_dir, optional_path(root), image_size, self.sets)
        self.augment, self.val_size = augment, val_size
        self.task_name = self.source.name
        require_positive(val_size=val_size)
        usual = {} if None not in (mean, std) else self._measured() if root else self._usual(dataset)
        given = {"mean": usual["mean"] if mean is None else mean, "std": usual["std"] if std is None else std}
        numbers = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        require_positive(std=min(numbers["std"]))
        self.spec = {**dict(zip(SHAPE, self.source.shape, strict=True)), "classes": self.source.classes, **numbers}

    @classmethod
    def as_recorded(cls, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings in canonical form: a known data set's numbers replace a `mean` or `std` of None."""
        usual = {} if settings.get("root") else cls._usual(str(settings.get("dataset")))
        given = super().as_recorded(settings)
        return {**given, **{name: usual[name] for name in usual if given.get(name) is None}}

    @classmethod
    def chance(cls, dataset: str = "cifar10", root: str | None = None, **settings: Any) -> float | None:
        return None if root or dataset not in cls.sets else 1 / len(cls.sets[dataset].classes)

    @classmethod
    def _usual(cls, dataset: str) -> dict[str, list[float]]:
        """Return mean and std of a known data set; {} for any other data set."""
        known = cls.sets.get(dataset)
        return {"mean": [*known.mean], "std": [*known.std]} if known else {}

    def prepare_data(self) -> None:
        if not self.splits:
            self.source.prepare()

    def load(self) -> dict[str, tuple[Tensor, ...]]:
        self.content = self.source.content
        splits = dict(self._training)
        if "test" in self.source.splits:
            splits["test"] = self.source.load("test")
        else:
            say(printable(f"{self.source.name} has no test split: nothing is tested"))
        sizes = {"test": 0} | {split: len(labels) for split, (_, labels) in splits.items()}
        self.note_counts(self.source.name, train=sizes["train"] + sizes["val"], test=sizes["test"])
        return splits

    @property
    def largest_class(self) -> dict[str, float]:
        held_out = {split: self.splits[split][1] for split in ("val", "test") if split in self.splits}
        return {split: labels.bincount().max().item() / len(labels) for split, labels in held_out.items()}

    def names(self, split: str) -> list[str] | None:
        return self.source.files(split)

    @cached_property
    def _training(self) -> dict[str, tuple[Tensor, ...]]:
        images, labels = self.source.load("train")
        if "val" in self.source.splits:
            return {"train": (images, labels), "val": self.source.load("val")}
        held_out = round(self.val_size * len(labels)) if self.val_size < 1 else int(self.val_size)
        if not 0 < held_out < len(labels):
            raise UserError(f"val_size={self.val_size} of {len(labels)} images leaves a split empty: change val_size")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(derive_seed(self.seed)))
        parts = {"train": order[held_out:], "val": order[:held_out]}
        return {split: (images[rows], labels[rows]) for split, rows in parts.items()}

    def _measured(self) -> dict[str, list[float]]:
        """Return mean and std of the training images' pixels, scaled to [0, 1], for each channel."""
        self.source.prepare()
        images, _ = self._training["train"]
        levels = torch.arange(256, dtype=torch.double) / 255
        counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)])
        shares = counts.double() / counts.sum(1, keepdim=True)
        mean = shares @ levels
        std = (shares @ levels.square() - mean.square()).clamp(min=1e-4).sqrt()
        return {name: [round(number, 4) for number in found.tolist()] for name, found in (("mean", mean), ("std", std))}

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        if self.augment and self.trainer and self.trainer.training:
            images = random_resized_crop_flip(images)
        return images, labels


class ImageTask(BlockTask, Classification):
    """Task of classifying images. The model is `ViT`; the default optimiser is Adam.

    By default, the learning rate is divided by ten after 100 and 150 epochs, which the paper's runs do not reach.

    Args:
        pool: input of the classification head: class (the output of the class token) or mean (the mean over patches).
        patch: side of a patch in pixels; must divide height and width of the images.
        milestones: epochs after which the schedule multistep divides the learning rate by ten.
    """

    unit = "images"
    must_match = ("classes",)
    milestones: Sequence[int] = ()  # a task with this attribute may use the schedule multistep

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        dim: int = 256,
        depth: int = 4,
        pos_dim: int = 50,
        activation: str = "gelu",
        expansion: Expansion = 1,
        dropout: float = 0.0,
        schedule: str = "multistep",
        patch: int = 4,
        pool: str = "class",
        smoothing: float = 0.0,
        milestones: list[int] = [100, 150],  # noqa: B006 (only read)
        **kwargs: Any,
    ) -> None:
        style: dict[str, Any] = {"activation": activation, "expansion": expansion, "dropout": dropout}
        super().__init__(dim=dim, depth=depth, pos_dim=pos_dim, schedule=schedule, **style, **kwargs)
        require_probability(smoothing=smoothing)
        require_positive(**{f"milestones[{i}]": epoch for i, epoch in enumerate(milestones)})
        self.patch, self.pool, self.smoothing, self.milestones = patch, pool, smoothing, milestones
        self.build(spec)

    def make_model(self, spec: Mapping[str, Any]) -> ViT:
        for name in ("mean", "std"):  # scaled to pixels from 0 to 255; shape (C or 1, 1, 1)
            self.register_buffer(name, 255 * torch.tensor(spec[name]).view(-1, 1, 1), persistent=False)
        shape = {name: spec[name] for name in SHAPE}
        tokens = count_tokens(spec["height"], spec["width"], self.patch)
        make_attention = self.attention(tokens, bias=False, score="model_scaled_dot")
        sizes = {"classes": len(spec["classes"]), "patch": self.patch, "dim": self.options["dim"], "pool": self.pool}
        return ViT(make_attention, **shape, **sizes, **self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (B, classes), of images with pixels from 0 to 255, uint8 or float, (B, C, H, W)."""
        normalised = (images - self.get_buffer("mean")).div_(self.get_buffer("std"))
        return self.model(normalised.to(next(self.model.parameters()).dtype))

    def predict(self, inputs: Tensor | Image.Image | str | Path | list[Any]) -> Tensor:
        """Return the most probable class of each image, int64 (B,); `class_title` returns the name of a class.

        `inputs` is a tensor of pixels from 0 to 255, (B, C, H, W) or (C, H, W); or a PIL image; or the path of an image
        file; or a list of these. A PIL image or a file is resized and cropped to the size of the training images.
        Raises UserError if a tensor has another shape, if a float tensor has pixels outside 0 to 255 or none above 1,
        or if a file is not an image.
        """
        shape: tuple[int, ...] = tuple(self.hparams["spec"][name] for name in SHAPE)
        if isinstance(inputs, list):
            return torch.cat([self.predict(one) for one in inputs])
        if isinstance(inputs, Tensor):
            pixels = inputs
        else:
            picture = read_image(str(inputs), str(inputs)) if isinstance(inputs, str | Path) else grey_or_rgb(inputs)
            channels, height, width = shape
            pixels = pil_to_tensor(fitted(picture, width, height).convert("L" if channels == 1 else "RGB"))
        images = pixels.unsqueeze(0) if pixels.ndim == 3 else pixels
        if images.ndim != 4 or images.shape[1:] != shape:
            raise UserError(f"images are {tuple(pixels.shape)}: expected (B, {', '.join(map(str, shape))})")
        if images.is_floating_point() and not (images.min() >= 0 and 1 < images.max() <= 255):
            low, high = images.min().item(), images.max().item()
            raise UserError(f"images have levels from {low:.4g} to {high:.4g}: expected grey levels from 0 to 255")
        return super().predict(images)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the dict of `Classification.predict_step`, with names of classes instead of numbers."""
        row = super().predict_step(batch, batch_idx)
        return row | {name: [*map(self.class_title, row[name].tolist())] for name in ("target", "prediction")}

    def class_title(self, label: int) -> str:
        return self.hparams["spec"]["classes"][label]

    def labels(self, layer: str, *inputs: Tensor) -> tuple[list[str], list[str]]:
        _, _, height, width = inputs[0].shape
        tokens = ["class", *map(str, range(1, count_tokens(height, width, self.patch)))]
        return tokens, tokens

    def overlay(self, weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        # row 0 of the attention map has the weights from the class token to the patches
        image = inputs[0][0].cpu()  # (C, H, W)
        rows = image.shape[1] // self.patch
        return rearrange(image, "c h w -> h w c"), rearrange(weights[:, 0, 1:], "a (h w) -> a h w", h=rows)
