"""Model the text of Shakespeare, or your own text (--text), character by character, with any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["characters"])
