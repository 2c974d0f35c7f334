"""Reverse, sort, swap, sub or copy lists of digits with a transformer of any attention."""

from kvt.cli.experiment import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["reverse", "sort", "swap", "sub", "copy"], option="task")
