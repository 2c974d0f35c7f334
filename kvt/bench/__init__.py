"""Measurements of time, memory and FLOPs of attention layers, as in Table 1 of the paper."""
