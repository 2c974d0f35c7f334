"""`kvt bench`: counts, times, files and errors."""

import csv
import sys
from functools import partial
from itertools import count, groupby, product

import pytest
import torch
from PIL import Image
from torch import nn

from kvt.attention import ATTENTION, AttentionFactory
from kvt.attention.factory import find_attention
from kvt.bench import measure
from kvt.bench.compare import Variant, compare
from kvt.bench.costs import DECODING, TRAINING
from kvt.bench.measure import cache_bytes_per_token, count_flops, decoding, paper_formulas, peak_bytes, steps, timed
from kvt.bench.plot import draw
from kvt.cli.main import main
from kvt.system import hardware

N, D, H, M = 12, 16, 4, 10
LITERAL = "kvt.bench.literal.LiteralKVPos"
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


def tensors(name):
    """How many numbers of a head's width an attention caches: Gemma's key and value are one projection, but differ."""
    return 2 if name in ("q-kv-gemma", "mla") else len(set(find_attention(name).projections[1:]))


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize("name", [*ATTENTION, LITERAL])
def test_every_step_of_decoding_is_the_last_row_of_the_whole_and_leaves_the_cache_as_it_was(name, kv_heads):
    layer, x = make(name, kv_heads=kv_heads), torch.randn(3, N, D)
    step, cache = decoding(layer, x)
    held = [buffer.clone() for buffer in cache.buffers]
    for _ in range(3):
        torch.testing.assert_close(step(), layer(x, causal=True)[:, -1:])
        assert cache.length == N
    torch.testing.assert_close(cache.buffers, held)
    assert cache.nbytes == tensors(name) * 3 * N * D // H * kv_heads * 4


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
    assert "".join(name for name, _ in groupby(called)) == "abc" * 4  # the first time to find the number of calls
    assert all(len(samples[name]) == 3 and min(samples[name]) > 0 for name in "abc")
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-3)
    assert timed({"": (calls := count()).__next__}, rounds=1)[""][0] < 1e-5
    assert next(calls) > 1000


@pytest.fixture
def bench(in_tmp_dir, monkeypatch, capsys):
    """Runs `kvt bench`; returns the rows of its CSV, and what it prints."""

    def call(*words, out="bench"):
        monkeypatch.setattr(sys, "argv", ["kvt", "bench", *words, "--device", "cpu"])
        main()
        with (in_tmp_dir / f"{out}.csv").open(newline="") as file:
            return list(csv.DictReader(file)), capsys.readouterr().out

    return call


def test_every_attention_at_every_size(bench, in_tmp_dir):
    rows, printed = bench(*QUICK, "--attn", *ATTENTION, LITERAL, "--plot")
    names = [*ATTENTION, "LiteralKVPos"]
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
        assert row["note"] == ""
    assert {r["training_ratio"] for r in rows if r["attention"] == "qkv" and r["kv_heads"] == "2"} == {"1"}
    assert (in_tmp_dir / "bench.md").read_text() == printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 2 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    with Image.open("bench.png") as picture:
        assert picture.format == "PNG"
        picture.load()
    assert {path.name for path in in_tmp_dir.iterdir()} == {"bench.csv", "bench.md", "bench.png"}


def test_decoding_at_every_size(bench, in_tmp_dir):
    rows, printed = bench(*QUICK, "--batch", "1", "3", "--attn", *ATTENTION, "--decode", "--plot")
    assert [(int(r["batch"]), int(r["n"]), int(r["kv_heads"]), r["attention"]) for r in rows] == [
        (batch, n, kv_heads, name) for batch in (1, 3) for n in (6, 4) for kv_heads in (2, 1) for name in ATTENTION
    ]
    for row in rows:
        for name in ("tokens_per_s", "tokens_ratio"):
            assert 0 < float(row[f"{name}_q1"]) <= float(row[name]) <= float(row[f"{name}_q3"])
        of_a_token = tensors(row["attention"]) * 4 * int(row["kv_heads"]) * 4
        assert int(row["cache_bytes_per_token"]) == of_a_token
        assert int(row["cache_bytes"]) == of_a_token * int(row["batch"]) * int(row["n"])
        assert float(row["cache_ratio"]) == of_a_token / 64  # the first has two tensors of two heads
        assert row["note"] == ""
    assert {r["tokens_ratio"] for r in rows if r["attention"] == "qkv" and r["kv_heads"] == "2"} == {"1"}
    assert (in_tmp_dir / "bench.md").read_text() == printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == 2 * 4 + len(rows)
    assert len({line.count("|") for line in lines}) == 1
    with Image.open("bench.png") as picture:
        picture.load()


@pytest.mark.parametrize("cost", [TRAINING, DECODING])
def test_the_plot_shows_each_attention_against_n(cost):
    variants = [Variant(name, name, 2, None) for name in ("qkv", "k")]
    sizes = [(n, d, batch) for d, batch in ((8, 1), (8, 2), (4, 1)) for n in (4, 2)]
    settings = {"pos_dim": 4, "repeats": 1, "device": "cpu"}
    rows = [row for n, d, batch in sizes for row in compare(cost, variants, n, d, batch=batch, **settings)]
    panels = draw(cost, rows).axes
    titles = ["d = 8, batch 1", "d = 8, batch 2", "d = 4, batch 1"]
    shown = [column for column in cost.columns if column.label]
    assert len(shown) == 2
    assert [panel.get_title() for panel in panels] == titles * 2
    assert [panel.get_ylabel() for panel in panels[::3]] == [column.label for column in shown]
    for panel, (column, (_, d, batch)) in zip(panels, product(shown, sizes[::2]), strict=True):
        for line, variant in zip(panel.lines, variants, strict=True):
            assert line.get_label() == f"{variant.name}, heads 2"
            drawn = {
                row["n"]: row for row in rows if (row["attention"], row["d"], row["batch"]) == (variant.name, d, batch)
            }
            assert [*line.get_xdata()] == [2, 4]
            assert [*line.get_ydata()] == [drawn[n][column.name] / column.unit for n in (2, 4)]


def test_arguments_of_an_attention(bench):
    """It is measured as they say, and named as in reports."""
    attentions = ["qkv", "q-kv,kv_heads=1", "mla,rank=3,rope=0.5", "kv+phase,phase=[0.1,0.2]"]
    rows, _ = bench(*QUICK, "--n", "4", "--kv_heads", "2", "--decode", "--attn", *attentions)
    bytes_of_a_token = {row["attention"]: int(row["cache_bytes_per_token"]) for row in rows}
    assert bytes_of_a_token == {
        "qkv": 4 * 2 * 8,
        "q-kv, kv_heads 1": 4 * 4,
        "mla, rank 3, rope 0.5": 4 * (3 + 2),
        "kv+phase, phase [0.1, 0.2]": 4 * 2 * 8,
    }
    assert [row["kv_heads"] for row in rows] == ["2", "1", "", ""]


def test_a_users_attention(bench):
    rows, printed = bench(*QUICK, "--attn", "kv", "tests.bench.test_bench.Mean", "--out", "mine", out="mine")
    mean = [row for row in rows if row["attention"] == "Mean"]
    assert len(mean) == 2  # it has no kv_heads
    assert mean[0]["kv_heads"] == mean[0]["paper_parameters"] == mean[0]["cache_bytes_per_token"] == ""
    assert float(mean[0]["training_ratio"]) > 0
    assert "| Mean | 2 |" in printed


class Greedy(Mean):
    """Runs out of memory with more than five tokens."""

    def forward(self, x):
        return super().forward(x) if x.shape[1] < 6 else torch.empty(10**15).sum()


@pytest.mark.parametrize("order", [["kv", "tests.bench.test_bench.Greedy"], ["tests.bench.test_bench.Greedy", "kv"]])
def test_running_out_of_memory_does_not_affect_the_others(bench, order):
    rows, printed = bench(*QUICK, "--attn", *order)
    rows = [row for row in rows if row["kv_heads"] != "1"]
    notes = {(row["n"], row["attention"]): row["note"] for row in rows}
    assert notes == {("6", "kv"): "", ("6", "Greedy"): "out of memory", ("4", "kv"): "", ("4", "Greedy"): ""}
    assert "| out of memory |" in printed
    for row in rows:
        known = row["note"] == ""
        assert bool(row["training_ms"]) == known
        assert bool(row["training_ratio"]) == (known and not (row["n"] == "6" and order[0] != "kv"))


MISTAKES = [
    (["--attn", "kvpos"], ["kvpos", "did you mean 'kv+pos'"]),
    (["--attn", "torch.nn.Linear"], ["torch.nn.Linear", "cannot be made"]),
    (["--heads", "3"], ["heads=3", "dim=64"]),
    (["--attn", "mla,ranks=3"], ["ranks", "mla", "did you mean 'rank'"]),
    (["--attn", "mla,rank=a"], ["rank"]),
    (["--n", "16", "-1"], ["n=-1"]),
    (["--batch", "4", "0"], ["batch=0"]),
    (["--decode", "--attn", "kv", "tests.bench.test_bench.Mean"], ["--decode", "Mean", "cache", "--attn"]),
    (["--decode", "--attn", "tests.helpers.small_models.Forgetful"], ["--decode", "Forgetful", "cache", "--attn"]),
    (["--device", "gpu"], ["device 'gpu'", "choose from", "cpu"]),
    (["--out", "nowhere/table"], ["--out nowhere/table", "No such file"]),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES, ids=lambda words: " ".join(words)[:40])
def test_mistakes(mistake, monkeypatch, words, named):
    monkeypatch.setattr("kvt.cli.bench.compare", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["kvt", "bench", *words])
    line = mistake(main)
    for word in named:
        assert word in line
