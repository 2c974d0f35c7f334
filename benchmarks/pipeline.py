"""Images per second, augmented and normalised as CIFAR's for training: whole batches against image by image.

*kvt* crops, resizes and mirrors each batch of 128 at once, in the training process. *torchvision* does it with PIL
images in a `DataLoader`, in that process or in persistent workers. A sample is an epoch.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from comparison import Flags, digits, head, row, timed, times
from paper import Examples
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from kvt.bench.measure import quartiles
from kvt.data.augment import random_resized_crop_flip
from kvt.data.loader import Batches

IMAGES, BATCH, SIDE = 50 * 128, 128, 32
WORKERS = (0, 2, 4)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class AugmentedImages(Examples):
    """uint8 (N, 3, H, W) and labels, served as torchvision's data sets do: one PIL image at a time."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels)
        self.pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(images.shape[-2:], scale=(0.8, 1.0), ratio=(0.9, 1.1)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.transform(Image.fromarray(self.pixels[index])), self.tensors[1][index]


def epoch(batches: Iterable[Sequence[Tensor]]) -> Callable[[], None]:
    def run() -> None:
        for _ in batches:
            pass

    return run


def our_epoch(images: Tensor, labels: Tensor) -> Callable[[], None]:
    batches = Batches(images, labels, batch_size=BATCH, shuffle=True)
    mean, std = (255 * torch.tensor(numbers).view(-1, 1, 1) for numbers in (MEAN, STD))

    def run() -> None:
        for pixels, _ in batches:
            (random_resized_crop_flip(pixels) - mean) / std

    return run


def main(argv: Sequence[str] | None = None) -> None:
    asked = Flags(__doc__, repeats=7).switch(argv)
    images = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8)
    labels = torch.randint(10, (IMAGES,))
    runs = {"kvt": our_epoch(images, labels)}
    for workers in WORKERS:
        loader = DataLoader(
            AugmentedImages(images, labels),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        runs[f"torchvision, {workers} workers"] = epoch(loader)
    samples = timed(runs, asked.repeats)
    head("", "images/s", "kvt's rate / this")
    for name, seconds in samples.items():
        row(name, digits(IMAGES / quartiles(seconds)[1]), times(seconds, samples["kvt"]))


if __name__ == "__main__":
    main()
