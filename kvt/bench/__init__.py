"""The cost of attention layers: Table 1 of the paper, measured."""
