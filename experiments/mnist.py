"""Classify MNIST or FashionMNIST with a vision transformer of any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["mnist", "fashion_mnist"], option="dataset")
