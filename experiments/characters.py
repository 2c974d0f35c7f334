"""Write like Shakespeare, or like any text of your own (--text), character by character, with any attention."""

from kvt.cli.experiment import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["characters"])
