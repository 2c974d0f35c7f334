"""`kvt bench`: counts, times, files and errors."""

import csv
import sys
from functools import partial
from itertools import chain, groupby, product

import pytest
import torch
from PIL import Image
from torch import nn

from kvt import bench as benchmark
from kvt import tune as hardware
from kvt.attention import ATTENTION, AttentionFactory
from kvt.bench import cache_bytes_per_token, compare, count_flops, draw, paper_formulas, peak_bytes, steps, timed
from kvt.commands import main

N, D, H, M = 12, 16, 4, 10
LITERAL = "kvt.attention.literal.LiteralKVPos"
SCORE = 2 * N * N * D
"""FLOPs of Q Kᵀ, and as many of A V."""
QUICK = ["--n", "6", "4", "--d", "8", "--heads", "2", "--batch", "2", "--pos_dim", "4", "--repeats", "2"]


def make(name, **attn_kwargs):
    return AttentionFactory(name, attn_kwargs, heads=H, pos_dim=M, max_len=N)(D)


@pytest.mark.parametrize(
    ("name", "kv_heads", "projections", "products"),
    [
        ("qkv", 4, 4 * D, 2 * SCORE),
        ("qkv", 1, 2 * D + 2 * D / H, 2 * SCORE),
        ("kv", 4, 3 * D, 2 * SCORE),
        ("q-kv", 4, 3 * D, 2 * SCORE),
        ("k", 4, 2 * D, 2 * SCORE),
        ("identity", 4, 2 * D, 0),
        # and the linear map from m channels, for each head and pair of tokens
        (LITERAL, 4, 3 * D, 2 * SCORE + 2 * H * N * N * M),
    ],
)
def test_flops_equal_those_counted_by_hand(name, kv_heads, projections, products):
    layer, x = make(name, kv_heads=kv_heads), torch.randn(1, N, D)
    assert count_flops(lambda: layer(x)) == 2 * N * D * projections + products


@pytest.mark.parametrize("n", [16, 128, 300])
def test_flops_are_those_of_the_formula_whichever_kernel_a_processor_takes(monkeypatch, n):
    layer = AttentionFactory("kv+pos", heads=2, pos_dim=M, max_len=n)(8)
    projections, maps, positions = 3 * 8 * 8 * n, 2 * 8 * n * n, layer.positions.columns.shape[1] * n
    for fast in (False, True):
        monkeypatch.setattr(hardware, "fast_products", fast)
        assert count_flops(lambda: layer(torch.randn(1, n, 8))) == 2 * (projections + maps + positions)


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds"),
    [
        ("qkv", 2 * D * D, 2 * N * D * D),
        ("kv", D * D, N * D * D),
        ("kv+pos", D * D + M, N * D * D + N * N * M),
        (LITERAL, D * D + M, N * D * D + N * N * M),
        ("identity", None, None),
        ("tests.bench.test_bench.Mean", None, None),
    ],
)
def test_the_papers_table_1(name, parameters, multiply_adds):
    assert paper_formulas(make(name), N) == (parameters, multiply_adds)


def cached(name, **attn_kwargs):
    return cache_bytes_per_token(make(name, **attn_kwargs), torch.randn(1, N, D))


def test_shared_tensors_are_cached_once():
    assert cached("qkv") == cached("kv") == cached("kv+pos") == 2 * D * 4
    for both, shared in (("qkv", "q-kv"), ("kv", "k"), ("kv+pos", "k+pos"), ("kv+phase", "k+phase")):
        for kv_heads in (H, 1):
            assert 2 * cached(shared, kv_heads=kv_heads) == cached(both, kv_heads=kv_heads)
    assert cached("qkv", kv_heads=1) == cached("qkv") / H
    assert cached("tests.bench.test_bench.Mean") is None


class Mean(nn.Module):
    """A user's attention without heads, cache or scores."""

    def __init__(self, dim):
        super().__init__()
        self.value = nn.Linear(dim, dim)

    def forward(self, x):
        return self.value(x).mean(1, keepdim=True).expand_as(x)


def test_peak_memory_is_the_most_held_at_once():
    def step():
        first = torch.empty(1000)
        del first
        second, third = torch.empty(600), torch.empty(700)
        return second, third

    assert peak_bytes(step, "cpu") == 4 * 1300


def test_a_training_step_computes_and_discards_all_gradients():
    layer, x = make("kv+pos"), torch.randn(2, N, D, requires_grad=True)
    reached = set()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        tensor.register_hook(lambda gradient, name=name: reached.add(name))
    forward, training = steps(layer, x)
    forward()
    assert reached == set()
    training()
    assert reached == {"x", *dict(layer.named_parameters())}
    assert all(tensor.grad is None for tensor in [x, *layer.parameters()])


def test_samples_are_taken_in_turns_and_last_long_enough(monkeypatch):
    called = []
    samples = timed({name: partial(called.append, name) for name in "abc"}, rounds=3)
    assert "".join(name for name, _ in groupby(called)) == "abc" * 3
    assert all(len(samples[name]) == 3 and min(samples[name]) > 0 for name in "abc")
    called.clear()
    monkeypatch.setattr(benchmark, "SAMPLE_SECONDS", 1e-3)
    assert timed({"": partial(called.append, "")}, rounds=1)[""][0] < 1e-4
    assert len(called) > 100


@pytest.fixture
def bench(in_tmp_dir, monkeypatch, capsys):
    """Runs `kvt bench`; returns the rows of its CSV, and what it prints."""

    def call(*words, out="bench"):
        monkeypatch.setattr(sys, "argv", ["kvt", "bench", *words, "--device", "cpu"])
        main()
        with (in_tmp_dir / f"{out}.csv").open(newline="") as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    return call


@pytest.mark.slow
def test_every_attention_at_every_size(bench, in_tmp_dir):
    rows, printed = bench(*QUICK, "--attn", *ATTENTION, LITERAL, "--plot")
    names = [*ATTENTION, LITERAL]
    assert [(int(r["d"]), int(r["n"]), int(r["kv_heads"]), r["attention"]) for r in rows] == [
        (8, n, kv_heads, name) for n in (6, 4) for kv_heads in (2, 1) for name in names
    ]
    for row in rows:
        if row["kv_heads"] == "2" and "pos" not in row["attention"].lower():
            layer = AttentionFactory(row["attention"], heads=2, kv_heads=2, max_len=1)(8)
            assert int(row["parameters"]) == sum(p.numel() for p in layer.parameters())
        for time in ("forward_ms", "training_ms", "training_ratio"):
            assert 0 < float(row[f"{time}_q1"]) <= float(row[time]) <= float(row[f"{time}_q3"])
        assert int(row["training_peak_bytes"]) > 0
    assert {r["training_ratio"] for r in rows if r["attention"] == "qkv" and r["kv_heads"] == "2"} == {"1"}
    assert (in_tmp_dir / "bench.md").read_text() == printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    with Image.open("bench.png") as picture:
        assert picture.format == "PNG"
        picture.load()
    assert {path.name for path in in_tmp_dir.iterdir()} == {"bench.csv", "bench.md", "bench.png"}


def test_the_plot_shows_each_attention_against_n():
    size = {"heads": 2, "batch": 1, "pos_dim": 4, "device": "cpu"}
    of_sizes = [compare([("qkv", 1), ("k", 2)], {**size, "n": n, "d": d}, 1) for n, d in product((4, 2), (4, 8))]
    rows, shown = [*chain(*of_sizes)], product(("training_ms", "training_peak_bytes"), (4, 8))
    for panel, (column, d) in zip(draw(rows).axes, shown, strict=True):
        for line in panel.lines:
            of_line = [row for row in rows if (row["attention"], row["d"]) == (line.get_label().split(",")[0], d)]
            assert line.get_xydata().tolist() == sorted([row["n"], row[column]] for row in of_line)


def test_arguments_of_an_attention(bench):
    attentions = ["qkv", "q-kv,kv_heads=1", "mla,rank=3,rope=0.5", "kv+phase,phase=[0.1,0.2]"]
    rows, _ = bench(*QUICK, "--n", "4", "--kv_heads", "2", "--attn", *attentions)
    assert {row["attention"]: int(row["cache_bytes_per_token"]) for row in rows} == {
        "qkv": 4 * 2 * 8,
        "q-kv,kv_heads=1": 4 * 4,
        "mla,rank=3,rope=0.5": 4 * (3 + 2),
        "kv+phase,phase=[0.1,0.2]": 4 * 2 * 8,
    }
    assert [row["kv_heads"] for row in rows] == ["2", "1", "", ""]


def test_a_users_attention(bench):
    rows, printed = bench(*QUICK, "--attn", "kv", "tests.bench.test_bench.Mean", "--out", "mine", out="mine")
    mean = [row for row in rows if row["attention"].endswith("Mean")]
    assert len(mean) == 2  # it has no kv_heads
    assert mean[0]["kv_heads"] == mean[0]["paper_parameters"] == mean[0]["cache_bytes_per_token"] == ""
    assert float(mean[0]["training_ratio"]) > 0
    assert "Mean | 2 | – |" in printed
