"""Translate between the languages of Multi30k, or of your own files (--root), with any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["translation"])
