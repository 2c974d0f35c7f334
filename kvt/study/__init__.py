"""Studies train all runs of a grid in many processes or on many machines, and record the results."""
