"""Studies: the runs of a grid, made by many processes or machines."""
