"""Reverse, sort, swap, substitute, copy, shift or permute lists of digits, with a transformer of any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["reverse", "sort", "swap", "sub", "copy", "shift", "permute"], option="task")
