"""The numbers on the pages about results: each is computed here from a record, or the page says where it is from.

A text below has {} for each number that is computed; on the page it may be rounded, to any number of places. A decimal
that is in none of these texts needs a source in its sentence, or before it in its paragraph.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pandas as pd
import pytest
import torch
from claims import open_record, solved_of_all

from kvt.grids.cache import cache_bytes
from kvt.grids.cache import costs as costs_of_cache
from kvt.grids.cycles import add_cycles, level, longer_cycles, stands
from kvt.grids.padding import COUNTED, REAL, perplexity_costs
from kvt.reports.comparisons import NEARLY, steps_to_ceiling
from kvt.reports.tables import label
from kvt.study.grid import Run, read_grid
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"
NUMBER = r"(-?\d*\.\d+|-?\d+)"
DECIMAL = r"(?<![\w.,§])\d*\.\d+(?![\w.]*\d)"
SOURCE = re.compile(r"\[[0-9a-f]{7}\]|\]\(https?://|\]\(\.\./(?:tests|benchmarks)/|\bno record\b")
"""A commit of others, a paper, a test, or that there is no record."""
Told = Iterator[tuple[str, list[float]]]


def mean(record: str, attention: str, metric: str = "test/acc", **where) -> float:
    """Return the mean over settings of the means over seeds."""
    rows = chosen(record, attention, **where)
    return float(rows.groupby("setting")[metric].mean().mean())


def chosen(record: str, *attentions: str, **where) -> pd.DataFrame:
    rows = open_record(record).rows
    rows = rows[rows.attention.isin(attentions)]
    for name, value in where.items():
        rows = rows[rows[name].isin(value if isinstance(value, list) else [value])]
    return rows


def line(record: str, column: str, attention: str, baseline: str = "qkv", table: int = 0):
    """Return a comparison of one of a report's tables."""
    asked = (table, column, attention, baseline)
    lines = open_record(record).lines
    [found] = [one for one in lines if (one.table, one.column, one.attention, one.baseline) == asked]
    return found


def gap_on_characters(step: int, dim: int) -> float:
    """Return KV's validation loss less QKV's after so many steps: the mean over settings of the means over seeds."""
    histories = pd.read_csv(RESULTS / "figure5-laptop" / "histories.csv.gz")
    losses = histories[histories.step == step].dropna(subset="val/loss").set_index("name")["val/loss"]
    runs = chosen("figure5-laptop", "qkv", "kv", dim=dim)
    runs = runs.assign(loss=runs.name.map(losses)).pivot(index=["setting", "seed"], columns="attention", values="loss")
    return float((runs["kv"] - runs["qkv"]).groupby("setting").mean().mean())


def behind(*where) -> list[float]:
    """Return by how many points an attention is behind, and the ends of the interval."""
    found = line(*where)
    return [-100 * found.difference, -100 * found.high, -100 * found.low]


def published(record: str, attention: str, column: str) -> float:
    """Return a published mean, by the name of its column in the paper."""
    table = open_record(record).table("test/acc")
    return (table.printed or table.published)[attention][column][0]


def solved(record: str, *attentions: str, **where) -> int:
    return int((chosen(record, *attentions, **where)["test/acc"] >= NEARLY).sum())


@cache
def of_cycles(record: str) -> pd.DataFrame:
    """Return the runs of a record with the level of the law, whether they stand on a level, and how far from the law's.

    Without those of attentions without self, of which the page does not speak.
    """
    found = open_record(record)
    rows = add_cycles(found.rows, found.grid)
    rows = rows[~rows.attention.str.contains("attend_self")]
    length = found.grid.runs[0].value("length")
    rows["level"] = rows.cycle.map(lambda cycle: level(length, longer_cycles(length, cycle)))
    rows["broken"] = ((1 - rows["test/acc"]) / (1 - level(length, 1))).round()
    return rows.assign(stands=stands(rows["test/acc"], length), above=rows["test/acc"] - rows.level)


def one_head(record: str, *attentions: str) -> pd.DataFrame:
    """Return the runs of one head in one layer with cycles longer than two."""
    rows = of_cycles(record)
    return rows[rows.attention.isin(attentions) & (rows.depth == 1) & (rows.heads == 1) & (rows.cycle > 2)]


def findings() -> Told:
    yield from lists()
    yield from learning_rates()
    gains = [
        100 * (published("table3-laptop", name, "cifar100") - published("table3-laptop", "qkv", "cifar100"))
        for name in ("kv", "kv+pos")
    ]
    yield "gains on CIFAR-100, {} points for KV and {} for KV+Pos", gains
    anywhere, last = (
        100 * line("leak-follow-up", column, "kv+pos").difference for column in ("anywhere", "always last")
    )
    yield "KV+Pos is {} points above QKV with the odd image anywhere, and {} points with", [anywhere, last]
    steps = open_record("figure5-text").table("val/loss").published
    values = [steps[name]["64, d 192, 6 layers, 1,000 steps"][0] for name in ("qkv", "kv+pos", "kv")]
    yield "the losses in the notebook are {} for QKV, {} for KV+Pos and {} for KV", values
    told = line("figure5-laptop", "all models", "kv")
    yield "KV is on average {} nats behind QKV [{}, {}]. In the smaller models", [told.difference, told.low, told.high]
    growing = [gap_on_characters(step, dim=64) for step in (200, 400, 600, 800, 1000)]
    assert growing == sorted(growing)
    yield "shrinks from {} to {} nats", published_gaps_on_characters()
    numbers = line("figure6-paper", "lr 1e-3", "kv")
    yield "KV is behind QKV in all {} pairs", [numbers.pairs - numbers.better_in]
    runs = one_head("shift-laptop", "kv", "kv+pos")
    assert runs.above.max() <= 0.005
    text = "one head of QKV has an accuracy of {}. On cycles of more than two tokens, none of the {} runs"
    yield text, [mean("shift-laptop", "qkv"), len(runs)]


def learning_rates() -> Told:
    asked = {"task": "sort", "length": [64, 128]}
    same = {"dim": 32, "depth": 2, "heads": 4}  # the model of all runs of table2-tuning
    records = (("table2-tuning", {"lr": 3e-4}), ("table2-paper", same), ("table2-tuning", {"lr": 3e-3}))
    found = [mean(record, name, **asked, **own) for record, own in records for name in ("qkv", "kv+pos", "kv")]
    text = "QKV, KV+Pos and KV are {}, {} and {} at 3e-4, [{}, {} and {}](...) at 1e-3, and {}, {} and {} at 3e-3"
    yield text, found
    qkv, pos, kv = (
        chosen("table2-tuning", name, lr=3e-3).set_index(["length", "seed"])["test/acc"]
        for name in ("qkv", "kv+pos", "kv")
    )
    assert (qkv > pos).all()
    assert (qkv > kv).all()
    text = "KV is {} points behind QKV, and KV+Pos {} points, both in all {} pairs"
    yield text, [100 * (found[6] - found[8]), 100 * (found[6] - found[7]), len(qkv)]


def padding() -> Told:
    costs = perplexity_costs(open_record("follow-up-laptop").rows, "qkv")
    names = {"q-kv": "Q≠K=V", "kv": "KV", "k": "Q=K=V", "qkv, kv_heads 1": "QKV, one head of keys and values"}
    for name, words in (names | {"q-kv, kv_heads 1": "Q≠K=V, one head"}).items():
        found = costs[costs.attention == name].set_index("setting")
        of = {
            setting: 100 * found.loc[found.index.str.startswith(setting)] for setting in ("loss_on=all", "loss_on=real")
        }
        padded = of["loss_on=all"].sort_values("padding")[[COUNTED, REAL]].to_numpy().ravel()
        packed = [of["loss_on=real"].filter(like=f"length={n} ", axis=0)[REAL].item() for n in (128, 512)]
        yield f"| {words} | {{}} %, {{}} % | {{}} %, {{}} % | {{}} %, {{}} % |", [*padded, *packed]
    shares = 100 * np.sort(costs.padding[costs.padding > 0].unique())
    yield "| {} % padding: all targets, real targets | {} % padding: all, real |", [*shares]


def to_the_authors() -> Told:
    values = [published("table3-laptop", name, "anomaly") for name in ("kv+pos", "qkv", "kv")]
    yield "has an accuracy of {} for KV+Pos, {} for QKV and {} for KV", values
    for name in ("qkv", "kv", "kv+pos"):
        cells = [mean("leak-laptop", name, anomaly_position=at) for at in ("random", "last")]
        yield f"| {label(name)} | {{}} | {{}} |", cells
    anywhere, last = (line("leak-laptop", column, "kv+pos") for column in ("anywhere", "always last"))
    assert (anywhere.verdict, last.verdict) == ("as good", "undecided")
    yield "KV+Pos is {} points below QKV [{}, {}], as good", behind("leak-laptop", "anywhere", "kv+pos")
    values = [100 * last.difference, 100 * last.low, 100 * last.high]
    yield "it is {} points above QKV [{}, {}]", values
    anywhere, last = (line("leak-follow-up", column, "kv+pos") for column in ("anywhere", "always last"))
    assert (anywhere.settings, anywhere.seeds, last.settings, last.seeds) == (4, 1, 4, 1)
    yield (
        "KV+Pos is {} points above QKV at a random position, and {}",
        [100 * one.difference for one in (anywhere, last)],
    )
    sub = [published("table2-laptop", name, "sub") for name in ("qkv", "kv+pos", "kv")]
    yield "an accuracy of {} to {} for sub", [min(sub), max(sub)]


def lists() -> Told:
    record = open_record("table2-paper")
    yield "{} of 1,620 runs", [len(record.made)]
    assert record.wanted == 1620
    assert {verdict for task in ("sub", "copy") for verdict in verdicts("table2-paper", task)} == {
        "both at the ceiling"
    }
    reverse, of_reverse = solved_of_all(record, "reverse")
    values = [reverse["kv+pos"], of_reverse, reverse["kv"], reverse["qkv"]]
    yield "KV+Pos solves reverse in {} of {} runs, KV in {} and QKV in {}", values
    pairs = line("table2-sorting", "sort", "kv").pairs
    text = "KV is on average {} points below QKV [{}, {}], in {} pairs of six settings. This difference is significant"
    yield text, [*behind("table2-sorting", "sort", "kv"), pairs]
    assert verdicts("table2-sorting", "sort") == ["", "worse"]
    sub = [published("table2-laptop", name, "sub") for name in ("qkv", "kv+pos", "kv")]
    yield 'So the {} to {} of "sub" are accuracies of swap', [min(sub), max(sub)]


def at_one_rate(attention: str) -> pd.DataFrame:
    """Return the runs of recall with each learning rate, of an attention with self."""
    runs = pd.read_csv(RESULTS / "recall-workstation" / "results.csv").drop_duplicates("name")
    return runs[(runs["model.attn"] == attention) & runs["model.attn_kwargs"].isna()]


def verdicts(record: str, column: str) -> list[str]:
    """Return the verdicts of KV+Pos and of KV beside QKV."""
    return [line(record, column, name).verdict for name in ("kv+pos", "kv")]


def steps_to_solve(attention: str) -> tuple[float, float]:
    """Return the fewest and the most steps to 99 % of the longer runs of one question; all get there."""
    runs = chosen("keyless-laptop", attention, task="associative_recall", max_epochs=25)
    assert {*runs.heads} == {1, 2, 4}
    histories = pd.read_csv(RESULTS / "keyless-laptop" / "histories.csv.gz")
    steps = runs.name.map(steps_to_ceiling(histories, "val/acc"))
    assert steps.notna().all()
    return steps.min(), steps.max()


def recall() -> Told:
    attentions = ("qkv", "q-kv", "kv+pos", "kv+phase", "kv", "k")
    for name in attentions:
        cells = [mean("recall-laptop", name, pairs=pairs, dim=dim) for pairs in (4, 8) for dim in (32, 64, 128)]
        yield f"| {label(name)} | " + " | ".join(["{}"] * 6) + " |", cells
    for name in (*attentions, WITHOUT_SELF):
        runs = [chosen("recall-workstation", name, heads=n)["test/acc"] for n in (1, 2)]
        counts = [count for found in runs for count in ((found >= NEARLY).sum(), len(found))]
        yield f"| {label(name)} | {{}} of {{}} | {{}} of {{}} |", counts
    each = pd.read_csv(RESULTS / "recall-workstation" / "results.csv")  # of both rates
    each = each[each["model.attn"] == "kv"]
    without = each["model.attn_kwargs"].notna()
    wide, narrow = (
        [g["test/acc"] >= NEARLY for _, g in each[each["model.dim"] == d].groupby(without)] for d in (64, 32)
    )
    text = "KV without self learns the task in all {} runs, with both learning rates, and KV in {} of {}."
    yield text, [wide[1].sum(), wide[0].sum(), len(wide[0])]
    assert wide[1].all()
    qkv = at_one_rate("qkv")
    qkv = qkv["test/acc"][qkv["model.dim"] == 32] >= NEARLY
    yield (
        "At d 32 KV without self learns the task in none of {} runs, and QKV in {} of {}",
        [len(narrow[1]), qkv.sum(), len(qkv)],
    )
    failed = at_one_rate("qkv")["test/acc"] < NEARLY
    yield "at the better learning rate. Over both rates, {} of {} runs of QKV fail", [failed.sum(), len(failed)]
    assert not narrow[1].any()
    yield "has an accuracy of {} with 4 pairs and {} with 8", [1 / 4, 1 / 8]
    loss = 100 * (mean("recall-laptop", "qkv") - mean("recall-laptop", "q-kv"))
    yield "In the mean over the columns, Q≠K=V is {} points behind QKV", [loss]
    table = open_record("lengths-laptop").table("test/acc")
    yield "chance is {})", [min(table.chance.values())]
    for name in ("qkv", "kv+pos", "kv+phase", "kv"):
        longer = [mean("lengths-laptop", name, f"test/acc_{n}_long") for n in (128, 256, 512, 1024, 4096)]
        yield f"| {label(name)} | " + " | ".join(["{}"] * 6) + " |", [mean("lengths-laptop", name), *longer]
    yield from keyless()


def keyless() -> Told:
    brief = {"task": "associative_recall", "max_epochs": 5}
    early = chosen("keyless-laptop", "q-kv", **brief)
    assert {*early.heads} == {1, 2, 4}
    yield (
        "Q≠K=V has an accuracy of {} to {} with one, two and four heads",
        [early["test/acc"].min(), early["test/acc"].max()],
    )
    qkv = [mean("keyless-laptop", "qkv", heads=heads, **brief) for heads in (1, 2, 4)]
    yield "QKV has {} with one head, {} with two and {} with four", qkv
    routed = {std: f"kvt.grids.keyless.Routed, std {std}" for std in (0.02, 0.1)}
    yield "after {} to {} steps with any of these numbers of heads, QKV", [*steps_to_solve("q-kv")]
    yield "QKV after {} to {}. Keyless attention", [*steps_to_solve("qkv")]
    yield "as small as in the authors' code needs {} to {} steps", [*steps_to_solve(routed[0.02])]
    assert (chosen("keyless-laptop", routed[0.1], heads=1, **brief)["test/acc"] >= NEARLY).all()
    assert (chosen("keyless-laptop", "qkv", "q-kv", *routed.values(), task="mqar")["test/acc"] >= NEARLY).all()


WITHOUT_SELF = "kv, attend_self False"
PHASES = {"kv+phase": "π/4", "kv+phase, phase 1.5708": "π/2", "kv+phase, phase learned": "learned"}


def symmetry() -> Told:
    rows = of_cycles("shift-laptop")
    names = ["kv", "kv+pos", "qkv", "kv+phase", "kv+phase, phase 1.5708"]
    for words, cycle in (("one of 16", 16), ("two of 8", 8), ("four of 4", 4), ("eight of 2", 2)):
        of_cycle = rows[rows.cycle == cycle]
        cells, values = [], [of_cycle.level.iloc[0]]
        for name in names:
            found = of_cycle["test/acc"][of_cycle.attention == name].sort_values(ascending=False)
            perfect = found.min() > 0.9995
            cells.append("all {}" if perfect else "{}, {}, {}")
            values += [1.0] if perfect else [*found]
        yield f"| {words} | {{}} | " + " | ".join(cells) + " |", values
    law = one_head("shift-laptop", "kv", "kv+pos")
    on = (law.above.abs() <= 0.005).sum()
    text = "the {} runs of `kv` and `kv+pos` is more than half a point above the predicted level, {} are within"
    yield text, [len(law), on]
    yield "{} of all {} runs are within half a point", [rows.stands.sum(), len(rows)]
    others = rows["test/acc"][rows.attention.isin(["qkv, init symmetric", "q-kv"])]
    yield "(`init: symmetric`) and `q-kv` have {} in every run", [others.min()]
    table = rows[(rows.attention == "kv+pos, pos learned") & (rows.cycle == 4)]
    yield "escapes theorem 1 on the cycles of 4, with an accuracy of {}", [table["test/acc"].min()]
    stuck = rows[(rows.attention == "kv+phase") & (rows.cycle == 2)]["test/acc"].nsmallest(2)
    yield "`kv+phase` (π/4) ends at {} in two seeds", [stuck.mean()]

    rows = of_cycles("cycles-laptop")
    yield "{} of {} accuracies are within half a point", [rows.stands.sum(), len(rows)]
    moving = rows[rows.cycle > 1]
    perfect = moving.assign(done=moving["test/acc"] >= 0.995).groupby(["depth", "heads", "attention"]).done.sum()
    sizes = {(1, 1): "one layer, one head", (1, 4): "one layer, four heads"}
    sizes |= {(2, 1): "two layers, one head", (2, 2): "two layers, two heads"}
    for size, words in sizes.items():
        yield (
            f"| {words} | " + " | ".join(["{}"] * 6) + " |",
            [perfect[*size, a] for a in ("qkv", "kv", "kv+pos", *PHASES)],
        )
    yield "how many of these 15 runs have an accuracy within half a point of {}", [1.0]
    larger = moving[(moving.attention == "qkv") & (moving.depth * moving.heads > 1)]
    yield "`qkv` fails in {} of {} runs", [(larger["test/acc"] < 0.995).sum(), len(larger)]
    above = one_head("cycles-laptop", "qkv").above > 0.005
    yield "`qkv` is above this level in {} of {} runs", [above.sum(), len(above)]
    assert one_head("cycles-laptop", "kv", "kv+pos").above.max() <= 0.005
    small = moving[moving.attention.isin(["kv", "kv+pos"]) & (moving.depth == 1) & (moving.heads == 1)].broken
    yield "`kv` and `kv+pos` have {} to {} broken tokens of 16", [small.min(), small.max()]
    pairs = rows.broken[(rows.attention == "kv") & (rows.depth * rows.heads == 1) & (rows.cycle == 2)].sort_values()
    yield "`kv` has {}, {} and {} broken tokens on random cycles of two", [*pairs]
    report = (RESULTS / "cycles-laptop" / "report.md").read_text()
    table = report.partition("### Training steps to 99 % validation accuracy")[2]
    steps = [
        re.search(rf"^\| {re.escape(label(a))} \|.* (\d+) \(\d+ of 18\) \|$", table, re.MULTILINE)
        for a in ("qkv", "kv", "kv+pos", *PHASES)
    ]
    yield "{} for `qkv`, {} for `kv`, {} for `kv+pos`, and {}, {} and {} for", [float(found[1]) for found in steps]


def more_than(name: str, other: str = "qkv", with_also: str = "qkv") -> list[float]:
    """Return the mean difference of loss, masked and causal, over the seeds that all have."""
    found = []
    for objective in ("masked", "causal"):
        rows = chosen("lacks-laptop", name, other, with_also, objective=objective)
        losses = rows.pivot(index="seed", columns="attention", values="val/loss").dropna()
        found.append(float((losses[name] - losses[other]).mean()))
    return found


def lacks() -> Told:
    turned = "kv+phase, attend_self False, phase [0.7854, -0.7854]"
    titles = {"kv+phase, phase [0.7854, -0.7854]": "KV+Phase, two angles", turned: "KV+Phase without self, two angles"}
    for name in {*open_record("lacks-laptop").rows.attention} - {"qkv"}:
        yield f"| {titles.get(name) or label(name)} | {{}} | ... | ... | {{}} |", more_than(name)
    better, behind_qkv = (line("lacks-laptop", "masked", WITHOUT_SELF, other) for other in ("kv", "qkv"))
    yield "{} nats better than KV [{}, {}], in three seeds", [-better.difference, -better.high, -better.low]
    yield "KV without self is {} nats behind QKV [{}, {}]", [behind_qkv.difference, behind_qkv.low, behind_qkv.high]
    yield (
        "KV without self closes {} % of the gap",
        [100 * (1 - more_than(WITHOUT_SELF)[1] / more_than("kv", with_also=WITHOUT_SELF)[1])],
    )
    both = more_than(WITHOUT_SELF, "qkv, attend_self False")
    yield "KV without self is {} nats behind in masked models, and {} in causal models", both
    yield "two angles are {} nats better than one", [-more_than("kv+phase, phase [0.7854, -0.7854]", "kv+phase")[0]]
    gained, ahead, lead = (-more_than(turned, name)[0] for name in (WITHOUT_SELF, "qkv", "qkv, attend_self False"))
    text = "two angles is {} nats better than KV without self and {} better than QKV, but {} behind QKV without self"
    yield text, [gained, ahead, -lead]
    for column, words, other, sign in (
        ("all models", "{} nats better than KV, and", "kv", -1),
        ("all models", "{} better than QKV, but", "qkv", -1),
        ("sort", "{} points better than KV, 1.5", "kv", 100),
        ("sort", "{} worse than QKV |", "qkv", -100),
    ):
        told = line("figure5-laptop" if column == "all models" else "table2-laptop", column, WITHOUT_SELF, other)
        yield words, [sign * told.difference]
    images = [100 * line("table3-laptop", name, WITHOUT_SELF, "kv").difference for name in ("mnist", "cifar10")]
    yield "{} and {} points better |", images
    size = {"depth": 1, "heads": 1}
    [seed] = chosen("cycles-laptop", WITHOUT_SELF).seed.unique()
    cycles = [
        mean("cycles-laptop", name, cycle=n, seed=seed, **size) for name in (WITHOUT_SELF, "kv") for n in (2, 4, 16)
    ]
    yield "{}, {} and {} with cycles of 2, 4 and 16, where KV with this seed has {}, {} and {}", cycles
    shifts = [mean("shift-laptop", WITHOUT_SELF, by=by) for by in (1, 2, 4, 8)]
    laws = [level(16, by) for by in (1, 2, 4)]
    yield (
        "{}, {} and {} with cycles of 16, 8 and 4 (predicted: {}, {} and {}), {} with cycles of 2",
        [*shifts[:3], *laws, shifts[3]],
    )
    windows = [f"{n}, lr 1e-3" for n in (16, 32, 64, 128)]
    gaps = [behind("figure6-laptop", n, "kv")[0] for n in windows]
    shares = [
        100 * -behind("figure6-laptop", n, WITHOUT_SELF, "kv")[0] / gap for n, gap in zip(windows, gaps, strict=True)
    ]
    yield "{} %, {} %, {} % and **{} %**", shares
    better = line("figure6-laptop", "lr 1e-3", WITHOUT_SELF, "kv")
    values = [100 * better.difference, 100 * better.low, 100 * better.high]
    assert better.verdict == "better"
    yield "{} points better than KV [{}, {}]", values
    yield "{} points worse than QKV [{}, {}]", behind("figure6-laptop", "lr 1e-3", WITHOUT_SELF)
    yield "but {} nats behind QKV without self", [beyond_control("figure5-laptop", "val/loss")]


def beyond_control(record: str, metric: str) -> float:
    """Return the mean difference of KV without self to QKV without self, in the runs that both have."""
    rows = chosen(record, WITHOUT_SELF, "qkv, attend_self False")
    both = rows.pivot(index=["setting", "seed"], columns="attention", values=metric).dropna()
    return float((both[WITHOUT_SELF] - both["qkv, attend_self False"]).mean())


WAYS = {  # to share: the attention, its arguments, layers that share
    "nothing: QKV": ("qkv", None, 1),
    "keys and values by two heads: GQA": ("qkv", {"kv_heads": 2}, 1),
    "keys and values by all heads: MQA": ("qkv", {"kv_heads": 1}, 1),
    "the key is the value: Q≠K=V": ("q-kv", None, 1),
    "key = value, by two heads": ("q-kv", {"kv_heads": 2}, 1),
    "key = value, by all heads": ("q-kv", {"kv_heads": 1}, 1),
    "the key is the query: KV": ("kv", None, 1),
    "all three: Q=K=V": ("k", None, 1),
    "a latent of 64 numbers: MLA": ("mla", None, 1),
    "a latent of 128 numbers": ("mla", {"rank": 128}, 1),
    "keys and values by two layers": ("qkv", None, 2),
    "key = value, by two layers": ("q-kv", None, 2),
}


Cells = dict[str, tuple[str, list[float]]]
"""A cell of a table by attention, and the numbers in it."""


def sharing() -> Told:
    base = read_grid("cache", "laptop").runs[0]
    for words, (attn, settings, layers) in WAYS.items():
        run = replace(base, config=base.config.changed(attn=attn, attn_kwargs=settings, share_layers=layers))
        cells = [("{}", [cache_bytes(run) / 1024]), ("{}", [weights(run) / 1000])]
        for found, first in ((perplexity_points(), 0.0), (losses_above_qkv(), 0.0), (speeds_of_decoding(), 1.0)):
            cells.append(found.get(run.attention, ("–", [])) if words != "nothing: QKV" else ("{}", [first]))
        texts, values = zip(*cells, strict=True)
        yield f"| {words} | ... | {' | '.join(texts)} |", [*chain.from_iterable(values)]
    points = {name: values[0] for name, (_, values) in perplexity_points().items()}
    yield "{} points are {} %", [points["kv"], 100 * (np.exp(points["kv"] / 100) - 1)]
    for name in ("qkv, kv_heads 1", "q-kv, kv_heads 1"):
        nats = line("three-projections-laptop", "human_numbers", name, table=1).difference
        yield "numbers in words cost {} nats more", [nats]
    assert line("three-projections-laptop", "sort and images", "qkv, kv_heads 1").verdict == "as good"
    for way, words in (
        ("qkv, kv_heads 1", "values is {} points behind QKV [{}, {}]"),
        ("k", "Q=K=V is {} points behind [{}, {}]"),
    ):
        yield words, behind("three-projections-laptop", "sort and images", way)
    found = line("recall-workstation", "64 symbols, 4 pairs", "k")
    yield "learns [to recall in {} of {} models]", [found.solved, found.pairs]
    nats = {name: values[0] for name, (_, values) in losses_above_qkv().items()}
    latents = [nats[name] for name in nats if name.startswith(("q-kv", "mla"))]
    yield "are within {} nats of QKV", [max(abs(nats[name]) for name in ("qkv, kv_heads 2", "qkv, share_layers 2"))]
    yield "one key and value head is {} nats behind", [nats["qkv, kv_heads 1"]]
    yield (
        "is {} to {} nats behind. If the query, too, is the same vector (Q=K=V), the model is {} nats",
        [min(latents), max(latents), nats["k"]],
    )
    largest = max(open_record(f"{grid}-laptop").rows.parameters.max() for grid in ("follow-up", "cache"))
    yield "models have at most {} million weights", [largest / 1e6]
    yield from padding()
    yield from retrofitted()
    yield from at_equal_parameters()


def weights(run: Run) -> int:
    settings = {"tokenizer": "bytes", "length": run.value("length")}
    with torch.device("meta"):
        return run.config.classes["model"](settings, **run.config.model["init_args"]).num_parameters


def perplexity_points() -> Cells:
    """Return by how many points of perplexity each attention is above QKV."""
    asked = (1, "all rows", "qkv")
    lines = [one for one in open_record("follow-up-laptop").lines if (one.table, one.column, one.baseline) == asked]
    return {one.attention: ("{}", [100 * one.difference]) for one in lines}


def losses_above_qkv() -> Cells:
    """Return by how many nats each attention is above QKV in the record of the grid cache, once there is one."""
    if (record := open_record("cache-laptop")) is None:
        return {}
    found = costs_of_cache(record.rows.assign(cache=0), "qkv")
    return {row.attention: with_reach(row.difference, row.reach) for row in found.itertuples()}


def with_reach(difference: float, reach: float) -> tuple[str, list[float]]:
    return ("{}", [difference]) if pd.isna(reach) else ("{} ± {}", [difference, reach])


def speeds_of_decoding() -> Cells:
    """Return how many times as fast as QKV a layer decodes at each length, once that is measured."""
    if not (path := RESULTS / "cache-laptop" / "decoding.csv").exists():
        return {}
    rows = pd.read_csv(path).replace({"attention": {"mla, rank 64": "mla"}}).sort_values("n")
    speeds = rows.groupby("attention").tokens_ratio.apply(list)
    return {name: (" / ".join(["{}"] * len(ratios)), ratios) for name, ratios in speeds.items()}


def retrofitted() -> Told:
    """Tell how much greater losses are than QKV's: converted, trained on, and from the start, once it is recorded."""
    if not (path := RESULTS / "retrofit-laptop" / "losses.csv").exists():
        return
    rows = pd.read_csv(path, keep_default_na=False)
    means = rows.groupby(["how", "per cent", "attention", "task"]).loss.mean()  # a task's in alphabetical order
    assert (rows.groupby(["how", "per cent", "attention", "task"]).seed.nunique() == 1).all()
    trained = means["", 100]
    for attention in rows.attention.unique():
        way = "mean" if attention == "qkv" else "least_squares"  # the former is trained on as it is
        found = [means[way, 0, attention], means[way, 20, attention], trained[attention]]
        text = " | ".join(["{} / {}"] * 3)
        yield f"| {label(attention)} | {text} |", [*chain.from_iterable(loss - trained["qkv"] for loss in found)]


def at_equal_parameters() -> Told:
    """Tell how far attentions are behind QKV with as many weights, and in the same runs of models as wide."""
    for name in ("kv+pos", "kv"):
        equal = behind("table2-equal-parameters", "sort", name)
        yield equally("sort", name, equal, as_wide("table2-laptop", name, task="sort", dim=32, length=16))
    seeds = [*chosen("table3-equal-parameters", "qkv").seed.unique()]
    for name in ("kv+pos", "kv"):
        equal = behind("table3-equal-parameters", "all images", name)
        yield equally("images", name, equal, as_wide("table3-laptop", name, seed=seeds))
    rows = "rows of 128, packed"
    for name in ("qkv, kv_heads 1", "q-kv", "kv", "k"):
        found = (line(f"follow-up-{scale}", rows, name, table=1) for scale in ("equal-parameters", "laptop"))
        equal, wide = (100 * one.difference for one in found)
        yield equally("language_model", name, [equal], wide)


def equally(task: str, name: str, equal: list[float], wide: float) -> tuple[str, list[float]]:
    interval = " [{}, {}]" * (len(equal) > 1)
    return f"| {task} | {label(name)} | {{}}{interval} | {{}} |", [*equal, wide]


def as_wide(record: str, name: str, **where) -> float:
    """Return by how many points an attention is behind QKV in the runs of these settings."""
    qkv, other = (mean(record, attention, **where) for attention in ("qkv", name))
    return 100 * (qkv - other)


def published_gaps_on_characters() -> list[float]:
    """Return by how much KV's loss is above QKV's in the paper's notebook, after 1,000 and after 10,000 steps."""
    columns = [f"64, d 192, 6 layers, {steps} steps" for steps in ("1,000", "10,000")]
    losses = open_record("figure5-laptop").table("val/loss").published
    return [losses["kv"][column][0] - losses["qkv"][column][0] for column in columns]


TOLD: dict[str, Callable[[], Told]] = {
    "findings": findings,
    "recall": recall,
    "symmetry": symmetry,
    "sharing": sharing,
    "idea": lambda: iter(()),
    "to-the-authors": to_the_authors,
}


def without_programs(page: str) -> str:
    """Return the text of a page without tables that claims.py writes: a line for each paragraph, row or item."""
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    text = re.sub(r"```.*?```|\$\$.*?\$\$|<!-- table .*?<!-- end -->", "", text, flags=re.DOTALL)
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\n|\n(?=\||\* |#)", text))


def pattern(told: str) -> re.Pattern[str]:
    return re.compile(re.escape(told).replace(r"\{\}", NUMBER).replace(r"\.\.\.", "[^|]*").replace(r"\ ", " "))


@pytest.mark.slow
@pytest.mark.parametrize("page", TOLD)
def test_each_number_of_a_page_is_computed_from_a_record_or_has_another_source(page):
    rest = require_told(page, TOLD[page]())
    assert without_source(rest) == []


@pytest.mark.slow
def test_what_came_of_the_two_lacks_is_computed_from_their_records():
    """What else that page says is of runs, not of records."""
    require_told("lacks", lacks())


@pytest.mark.slow
def test_runs_of_translation_end_inside_the_warm_up():
    """So the claims about translation are not tested yet."""
    steps = pd.read_csv(RESULTS / "figure7-laptop" / "histories.csv.gz").step.max()
    [warmup] = {run.value("warmup") for run in read_grid("figure7", "laptop").runs}
    text = f"the runs end after {steps:,} steps, inside the warm-up of {warmup:,} steps"
    assert text in (REPOSITORY / "docs" / "claims.md").read_text()
    assert steps < warmup


def require_told(page: str, told: Told) -> str:
    """Return what else the page says."""
    rest = text = without_programs(page).replace("−", "-")
    for words, values in told:
        found = [*pattern(words).finditer(text)]
        said = any(all(map(is_rounded, one.groups(), values)) for one in found)
        should_be = words.replace("{}", "{:.3f}").format(*values)
        assert said, f"{page} should say: {should_be}; it says: {[one[0] for one in found]}"
        rest = pattern(words).sub("", rest)
    return rest


def is_rounded(number: str, value: float) -> bool:
    return abs(float(number) - value) <= 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9


def without_source(text: str) -> list[tuple[str, str]]:
    """Return each decimal that has no source in its sentence, or before it in its paragraph, with the sentence."""
    found = []
    for paragraph in re.sub(r"\$[^$]+\$|`[^`]*`", "", text).splitlines():
        sentences = re.split(r"(?<=[.:;])\s+(?=[^a-z])", paragraph)
        while sentences and not SOURCE.search(sentences[0]):
            sentence = sentences.pop(0)
            found += [(number, sentence) for number in re.findall(DECIMAL, re.sub(r"\]\([^)]*\)", "", sentence))]
    return found


def test_a_number_without_a_source_is_noticed():
    text = "KV has 0.5, of which there is no record. So it is 0.2.\nIn the end, KV has 0.7. So it is, in [abc1234]: 0.9"
    assert [number for number, _ in without_source(text)] == ["0.7"]
    assert is_rounded("0.5", 0.549)
    assert not is_rounded("0.50", 0.549)
