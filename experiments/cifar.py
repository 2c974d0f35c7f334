"""Classify CIFAR-10, CIFAR-100 or your own images (--root) with a vision transformer of any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["cifar10", "cifar100"], option="dataset")
