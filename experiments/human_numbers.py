"""Predict the next word while counting from one to 9999 in words, with a causal transformer of any attention."""

from kvt.commands import experiment

if __name__ == "__main__":
    experiment(__file__, __doc__ or "", ["human_numbers"])
