"""Grids of the paper's tables and figures and of ours, and the sections that only their reports have."""
