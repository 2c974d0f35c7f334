"""Grids of the paper's tables and figures and of our studies, with report sections and an attention for them."""
