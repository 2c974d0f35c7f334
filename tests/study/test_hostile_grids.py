"""Hostile grids of studies: runs that can be listed and reported, or one line that names the file; nothing is made."""

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from kvt.cli.main import execute
from tests.conftest import CONFIGS
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import spoiled

GRID = {
    "title": "Lists",
    "tasks": {"reverse": None, "sort": {"length": [4, 8]}},
    "axes": {"dim": [16, 32], "heads": 2, "attn": ["qkv", "kv"], "shape": [{"depth": 1, "pos_dim": 10}]},
    "seeds": [0, 1],
    "scales": {"paper": None, "smoke": {"about": "Quick.", "axes": {"dim": 16}, "seeds": [0]}},
    "columns": {"all": {}, "wide": {"dim": 32}},
    "tables": [
        {
            "metric": "test/acc",
            "columns": ["reverse", "sort"],
            "published": {"kv": {"reverse": [0.7, 0.1], "sort": 0.9}},
            "relabelled": {"reverse": "sort"},
            "note": "Of the paper.",
        },
    ],
}
NUMBERS = [0, -1, 1, 3, 0.5, 10**6, 2**32, 2**63, 10**30, float("nan"), float("inf"), -1e308, True]
TEXTS = ["", "x", "~", "ä\u2028", "🙂", "\x1b[2J", "a\nb", "a|b", "$x$", "\0", "<b>", "%s{0}", "../x", "x" * 9999]
TEXTS += ["os.system", "kvt.attention.KV", "torch.nn.Linear", "owned.Attention", "kv.", ".kv", "..", "\0.x", "é.x"]
TEXTS += [
    "reverse",
    "copy",
    "reverse.yaml",
    "../configs/reverse.yaml",
    "/dev/zero",
    "nowhere.yaml",
    "val/loss",
    "smoke",
]
NAMES = ["dim", "heads", "attn", "attn_kwargs", "lr", "seed", "spec", "devices", "max_epochs", "max_time", "callbacks"]
MANY = [[*range(12_000)], [0] * 12_000, {f"axis{n}": [1, 2] for n in range(2000)}, [[0, 1]] * 50]
INSIDE = [None, [], {}, [[]], [None], {"dim": 16}, {"dim": [16, 32]}, {"kv_heads": 1}, {"score": "os.system"}]
INSIDE += [{"class_path": "os.mkdir", "init_args": {"path": "made"}}, {"a": {"b": {"c": [1]}}}, [{"lr": 1}, {"dim": 8}]]
VALUES = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(NAMES) | st.sampled_from([*INSIDE, *MANY])
VALUES |= st.lists(st.sampled_from([*NUMBERS, *TEXTS]), max_size=3)


@pytest.fixture
def place(in_tmp_dir, monkeypatch) -> Path:
    """A working directory with a grid's configurations, and with code that leaves a trace."""
    monkeypatch.syspath_prepend(in_tmp_dir)
    monkeypatch.setattr("kvt.study.calibration.PATIENCE", 1.0)
    (in_tmp_dir / "grids").mkdir()
    (in_tmp_dir / "configs").symlink_to(CONFIGS)
    return in_tmp_dir / "grids" / "mine.yaml"


@fuzz(0.06, content=spoiled(GRID, VALUES), scale=st.sampled_from(["paper", "smoke"]))
def test_grids(held, place, content, scale):
    place.write_text(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    words = [str(place), "--scale", scale, "--folder", "runs"]
    if held(lambda: execute("study run", [*words, "--dry_run"]), "mine") is None:
        execute("study report", [*words, "--out", "report"])
        shutil.rmtree("report")
    assert sorted(path.name for path in Path().iterdir()) == ["configs", "grids"]
