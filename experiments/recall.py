"""Recall earlier tokens of a sequence with any attention: recall tasks, induction heads and copying."""

from kvt.commands import experiment

if __name__ == "__main__":
    tasks = ["mqar", "associative_recall", "induction", "selective_copy"]
    experiment(__file__, __doc__ or "", tasks, option="task")
