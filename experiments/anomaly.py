"""Find the image of another class in a set of images, with a transformer of any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["anomaly"])
