"""The paper's Table 1, measured: what every attention costs, side by side."""

from kvt.bench.command import bench

__all__ = ["bench"]
