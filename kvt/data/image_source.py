"""What every image classification data set can tell of itself."""

from abc import ABC, abstractmethod

from torch import Tensor

Shape = tuple[int, int, int]


class ImageSource(ABC):
    """Where an image classification data set comes from.

    `name`, `fingerprint` (tells it from any other), `classes` (sorted as the labels count) and `shape` (channels,
    height, width) are known at once.
    """

    name: str
    fingerprint: str
    classes: list[str]
    shape: Shape

    @abstractmethod
    def prepare(self) -> None:
        """Downloads or decodes whatever `load` needs, once; harmless to repeat, to race and to kill.

        Raises UserError for data that is missing, broken or cannot be stored.
        """

    @abstractmethod
    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """The images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test", after `prepare`."""
