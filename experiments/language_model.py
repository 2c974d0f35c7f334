"""Train a language model on your own text or code (--text, a file or a folder of any size), in bytes or byte pairs."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["language_model"])
