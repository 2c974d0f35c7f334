"""Images per second of CIFAR's augmentation and normalisation, for whole batches (kvt) and single images (torchvision).

*kvt* crops, resizes and mirrors each batch of 128 images at once, in the training process. *torchvision* transforms
single PIL images in a `DataLoader`, in the training process or in persistent workers. A sample is an epoch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from comparison import begin, flags, times
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

from kvt.bench import number, timed
from kvt.data.augment import random_resized_crop_flip
from kvt.data.loader import Batches
from kvt.markdown import markdown_table

IMAGES, BATCH, SIDE = 50 * 128, 128, 32
WORKERS = (0, 2, 4)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class AugmentedImages(TensorDataset):
    """Data set of uint8 images, (N, 3, H, W), and labels; torchvision augments each image when it is read."""

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


def our_epoch(images: Tensor, labels: Tensor) -> Callable[[], None]:
    batches = Batches(images, labels, batch_size=BATCH, shuffle=True)
    mean, std = (255 * torch.tensor(numbers).view(-1, 1, 1) for numbers in (MEAN, STD))

    def run() -> None:
        for pixels, _ in batches:
            (random_resized_crop_flip(pixels) - mean) / std

    return run


def main(argv: Sequence[str] | None = None) -> None:
    asked = begin(flags(__doc__, repeats=7), argv)
    images = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8)
    labels = torch.randint(10, (IMAGES,))
    runs: dict[str, Callable[[], object]] = {"kvt": our_epoch(images, labels)}
    for workers in WORKERS:
        loader = DataLoader(
            AugmentedImages(images, labels),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        runs[f"torchvision, {workers} workers"] = partial(deque, loader, maxlen=0)
    samples = timed(runs, asked.repeats)
    rows = [[name, number(IMAGES / median(s)), times(s, samples["kvt"])] for name, s in samples.items()]
    print("", markdown_table([["", "images/s", "kvt's rate / this"], *rows]), sep="\n")


if __name__ == "__main__":
    main()
