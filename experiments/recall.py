"""Recall earlier tokens of a sequence with any attention: recall tasks, induction heads, copying and compression."""

from kvt.cli.experiment import experiment

if __name__ == "__main__":
    tasks = "mqar associative_recall induction noisy_recall fuzzy_recall selective_copy compression memorization"
    experiment(__file__, __doc__ or "", tasks.split(), option="task")
