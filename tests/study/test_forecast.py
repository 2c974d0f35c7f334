"""The time that is left, from runs that are finished."""

from pathlib import Path

import yaml

from kvt.study.forecast import Times
from kvt.study.grid import read_grid
from tests.study.test_command import TINY


def seconds(text: str) -> int:
    hours, minutes, rest = map(int, text.removeprefix("about ").split(":"))
    return 3600 * hours + 60 * minutes + rest


def test_workers_share_the_runs(in_tmp_dir):
    axes = {"dim": 16, "heads": 2, "depth": 1, "attn": ["kv", "qkv"], "lr": [0.1, 0.2]}
    Path("grid.yaml").write_text(yaml.safe_dump(TINY | {"tasks": ["sort"], "axes": axes}))
    runs, times = read_grid(Path("grid.yaml")).runs, Times()
    assert times.left(runs, 1) == "unknown time"
    for run in runs:
        times.add(run, 30.0)
    for workers in (1, 4):
        assert seconds(times.left(runs, workers)) == 30 * len(runs) / workers
