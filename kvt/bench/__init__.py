"""Table 1 of the paper, measured: what every attention costs, side by side."""
