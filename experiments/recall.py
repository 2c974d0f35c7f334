"""Recall earlier tokens of a sequence: values of keys, induction heads, copying, compression, with any attention."""

from kvt.cli.experiment import experiment

if __name__ == "__main__":
    tasks = "mqar associative_recall induction noisy_recall fuzzy_recall selective_copy compression memorization"
    experiment(__file__, __doc__ or "", tasks.split(), option="task")
