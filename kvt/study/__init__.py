"""Studies: a grid of runs, worked off by many processes or machines, and a report of what they found."""
