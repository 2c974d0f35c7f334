"""The interface of image classification data sets."""

from abc import ABC, abstractmethod

from torch import Tensor

Shape = tuple[int, int, int]


class ImageSource(ABC):
    """Where an image classification data set comes from.

    Known at once: `name`, `fingerprint` (identifies the content), `classes` in the order of labels, and `shape`
    (channels, height, width).
    """

    name: str
    fingerprint: str
    classes: list[str]
    shape: Shape

    @abstractmethod
    def prepare(self) -> None:
        """Download or decode what `load` needs unless it is there; safe in several processes at once.

        Raises UserError for data that is missing, broken or cannot be stored.
        """

    @abstractmethod
    def load(self, split: str) -> tuple[Tensor, Tensor]:
        """Return images, uint8 (N, C, H, W), and labels, int64 (N,), of "train" or "test", after `prepare`."""
