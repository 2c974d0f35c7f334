"""Train a language model on your own text or code (--text, a file or a folder of any size), in bytes or byte pairs."""

from kvt.cli.lightning_cli import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["language_model"])
