"""Grids of the paper's tables and figures and of our own studies, and sections that only their reports have."""
