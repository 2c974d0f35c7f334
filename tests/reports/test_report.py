"""The report of a study: its numbers are those of the runs, and missing runs are counted."""

import re
from dataclasses import replace
from itertools import chain, product
from math import inf
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml

from kvt.commands import execute as command
from kvt.data.published import UNPUBLISHED
from kvt.reports.comparisons import CEILING, CHANCE, SILENT, Compared, cells_of, comparisons, with_means
from kvt.reports.figures import bars, forest
from kvt.reports.report import write_report
from kvt.reports.sections import summary
from kvt.reports.tables import Table, curves_of, metric_of, tables_of
from kvt.reports.text import (
    at_the_ceiling,
    comparisons_table,
    printed_table,
    results_table,
    steps_table,
    verdict_in_words,
)
from kvt.study.grid import TableEntry, read_grid
from kvt.study.outcomes import State, read_outcomes, table_of_results
from kvt.system import UserError
from kvt.tasks import ListTask
from kvt.tasks.metrics import Metric
from tests.helpers.drivers import METRICS, RESULT, finish

GRID = {
    "title": "Two tasks",
    "tasks": ["sort", "sub"],
    "axes": {
        **{"dim": 16, "depth": 1, "batch_size": 16, "train_size": 64, "val_size": 16, "test_size": 16},
        **{"max_epochs": 1, "heads": [1, 2], "attn": ["qkv", "kv+pos", "kv"]},
    },
    "seeds": [0, 1],
    "scales": {"paper": {"about": "All of it."}, "small": {"about": "A part.", "axes": {"heads": 2}}},
    "tables": [
        {
            "metric": "test/acc",
            "published": {"qkv": {"sort": [0.9, 0.1], "sub": 0.5}, "kv": {"sort": [0.8, 0.2], "sub": 0.4}},
            "relabelled": {"sort": "sub", "sub": "sort"},
            "note": "The columns were exchanged.",
        }
    ],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study whose runs of the first seed have results."""
    folder = tmp_path_factory.mktemp("study")
    path, root = folder / "two.yaml", folder / "runs"
    path.write_text(yaml.safe_dump(GRID, sort_keys=False))
    grid = read_grid(path, "paper")
    rng = np.random.default_rng(0)
    for run in grid.runs[:12]:
        loss, accuracy = map(float, rng.uniform(0.1, 0.9, 2))
        metrics = {"val/loss": loss, "test/acc": accuracy}
        history = f"step,seconds,train/loss,val/loss\n2,0.5,2.0,1.9\n4,1.0,1.5,{loss}\n"
        finish(run, root, RESULT | METRICS | metrics, history)
    return path, grid, root


@pytest.fixture(scope="module")
def written(study, tmp_path_factory):
    _, grid, root = study
    folder = tmp_path_factory.mktemp("report")
    write_report(grid, read_outcomes(grid.runs, root), folder)
    return folder


@pytest.fixture
def results(study):
    _, grid, root = study
    return table_of_results(grid, read_outcomes(grid.runs, root))


@pytest.fixture
def table(study) -> Table:
    (found,) = tables_of(study[1])
    return found


def cells(markdown: str) -> list[list[str]]:
    heading, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    return [heading, *lines]


def test_cells_are_means_and_what_is_missing_is_counted(results, table):
    heading, *lines = cells(results_table(cells_of(results, table), table))
    assert heading == ["", "sort", "sub", "mean"]
    assert [line[0] for line in lines] == [
        *("**QKV**", "published", "difference"),
        *("**KV+Pos**", "**KV**", "published", "difference", "n"),
    ]
    mean = results[(results.task == "sort") & (results.attention == "qkv")]["test/acc"].mean()
    assert lines[0][1].startswith(f"{mean:.3f} ± ")
    assert lines[-1][1:] == ["2 of 4 (2 settings, 1 of 2 seeds)"] * 2 + [""], "equal for all cells of a column"
    assert lines[1][1:] == ["0.500", "0.900 ± 0.100", "0.700"]
    assert float(lines[2][1]) == pytest.approx((mean - 0.5) * 100, abs=0.006)


class Distances(ListTask):
    """A task of one's own with other metrics, and a loss that need not be in nats."""

    metrics = (*ListTask.metrics, Metric("mae", better="less"), Metric("gap"), Metric("spread", better="more"))
    monitor = "val/spread"


OWN = {
    "model": {"class_path": f"{__name__}.Distances", "init_args": {"attn": "kv", "dim": 8, "depth": 1, "heads": 1}},
    "data": {"class_path": "kvt.tasks.DigitLists", "init_args": {"task": "sort"}},
}


@pytest.mark.parametrize(
    ("table", "verdict"),
    [
        ({"metric": "test/mae"}, "worse"),  # the task says so
        ({"metric": "test/spread"}, "better"),
        ({"metric": "test/gap"}, "direction unknown"),
    ],
)
def test_which_way_a_metric_of_ones_own_is_better_is_what_its_task_declares(table, verdict, tmp_path):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    content = {"tasks": ["own.yaml"], "axes": {"attn": ["qkv", "kv"]}, "seeds": [0, 1, 2], "tables": [table]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content))
    grid = read_grid(tmp_path / "grid.yaml", "full")
    for run in grid.runs:
        value = 0.51 + 0.08 * (run.attention == "kv") + 0.001 * run.seed * (run.attention == "kv")
        finish(run, tmp_path / "runs", RESULT | METRICS | {table["metric"]: value})
    write_report(grid, read_outcomes(grid.runs, tmp_path / "runs"), tmp_path)
    report = (tmp_path / "report.md").read_text()
    (line,) = re.findall(r"^\| own \| KV − QKV \|.*$", report, re.M)
    assert line.endswith(f"| {verdict} |")
    assert "+8.10 &#91;+7.85, +8.35&#93;" in line, "numbers there are in any case"
    assert "nats" not in "".join(path.read_text() for path in tmp_path.glob("*.svg")), "its loss is of no unit"


def test_a_relabelled_column_has_its_published_numbers_and_those_of_the_paper_are_below(results, table, written):
    right, printed = (cells(text) for text in (results_table(cells_of(results, table), table), printed_table(table)))
    columns = {name: [line[name] for line in right if line[0] == "published"] for name in (1, 2)}
    assert columns[2] == [line[1] for line in printed[1:]] == ["0.900 ± 0.100", "0.800 ± 0.200"]
    assert columns[1] == [line[2] for line in printed[1:]] == ["0.500", "0.400"]
    text = (written / "report.md").read_text()
    assert text.index("| published |") < text.index("in the columns that the paper prints")


def test_the_published_means_of_a_picture_stand_under_their_right_names(results, table):
    figure = bars(results, table)
    (diamonds,) = (line for line in figure.axes[0].lines if line.get_marker() == "D")
    columns = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    drawn = {(columns[round(x)], y) for x, y in diamonds.get_xydata() if np.isfinite(y)}
    assert drawn == {("sort", 0.5), ("sub", 0.9), ("sort", 0.4), ("sub", 0.8)}
    assert figure.legends[0].get_texts()[-1].get_text() == "published mean, column corrected"


def test_runs_are_paired_by_setting_and_seed():
    """Seeds and settings differ by far more than attentions: only pairs tell that kv is one point below."""
    rng = np.random.default_rng(0)
    cases = product(("sort", "sub"), map(str, range(6)), (0, 1), ("qkv", "kv"))
    results = pd.DataFrame(cases, columns=["task", "setting", "seed", "attention"])
    results = results.assign(name=results.index.map(str), state=State.FINISHED)
    level, noise = rng.uniform(0.2, 0.8, 24).repeat(2), rng.normal(0, 0.001, 48)
    results["test/acc"] = level + noise - 0.01 * (results.attention == "kv")
    shuffled = results.sample(frac=1, random_state=0).sort_values("attention", ascending=False)
    columns = {task: frozenset(results.name[results.task == task]) for task in ("sort", "sub")}
    table = Table("test/acc", metric_of("test/acc"), columns)
    for ordered in (results, shuffled):
        found = compared(ordered, table._replace(margin=0.5))
        assert found[["column", "attention", "pairs"]].values.tolist() == [["sort", "kv", 12], ["sub", "kv", 12]]
        assert ((found.low < -0.01) & (found.high > -0.01) & (found.high - found.low < 0.01)).all()
        assert {*found.verdict} == {"worse"}
        assert {*compared(ordered, table._replace(margin=2)).verdict} == {"as good"}


def compared(results: pd.DataFrame, *tables: Table) -> pd.DataFrame:
    """The comparisons of tables as a frame."""
    return pd.DataFrame(comparisons(results, tables), columns=Compared._fields)


def made(accuracies):
    """Results of one task, a setting each, of the runs of qkv and kv by seed; and their table."""
    rows = [
        {"task": "sort", "setting": setting, "seed": seed, "attention": attention, "test/acc": value}
        for setting, of_attentions in accuracies.items()
        for attention, values in of_attentions.items()
        for seed, value in enumerate(values)
    ]
    results = pd.DataFrame(rows).assign(state=State.FINISHED)
    results = results.assign(name=results.index.map(str))
    columns = {setting: frozenset(of.name) for setting, of in results.groupby("setting", sort=False)}
    table = Table("test/acc", metric_of("test/acc"), columns, chance=dict.fromkeys(results.name, 0.1))
    return results, table._replace(pools={"all": frozenset(results.name)})


def test_a_pool_leaves_out_what_tells_nothing_apart():
    """Zeros of settings at the ceiling or at chance would make any difference small, and any attentions equal."""
    telling = {"hard": {"qkv": [0.9, 0.91, 0.9], "kv": [0.8, 0.79, 0.8]}, "near": {"qkv": [1.0] * 3, "kv": [0.9] * 3}}
    silent = {"easy": {"qkv": [1.0, 0.995, 1.0], "kv": [0.999] * 3}, "chance": {"qkv": [0.1] * 3, "kv": [0.105] * 3}}
    found = []
    for cells in (telling, telling | silent):
        results, table = made(cells)
        pooled = compared(results, table).set_index("column").loc["all"]
        found.append(pooled.drop(["left_out", "p"]))
        assert pooled.left_out == len(cells) - 2
    pd.testing.assert_series_equal(*found)
    assert found[0].difference == pytest.approx(-(0.32 / 3 + 0.1) / 2)
    alone = compared(*made(silent)).set_index("column")
    assert [*alone.verdict] == [CEILING, CHANCE, SILENT]
    assert alone.p.isna().all()
    assert not alone.left_out.any()  # a comparison that has nothing else uses these settings


def test_all_comparisons_of_a_page_are_one_family():
    """However many tables it has, and whatever it calls them."""
    rng = np.random.default_rng(0)
    results, table = made(
        {f"s{n}": {"qkv": rng.uniform(0.5, 0.6, 3), "kv": rng.uniform(0.4, 0.55, 3)} for n in range(6)}
    )
    table = table._replace(pools={})
    one = compared(results, table)
    columns = [*table.columns]
    parts = [table._replace(columns={c: table.columns[c] for c in names}) for names in (columns[:2], columns[2:])]
    pd.testing.assert_frame_equal(compared(results, *parts).drop(columns="table"), one.drop(columns="table"))
    single = [compared(results, table._replace(columns={column: table.columns[column]})) for column in columns]
    alone = pd.concat(single, ignore_index=True)
    pd.testing.assert_frame_equal(alone[["low", "high", "difference"]], one[["low", "high", "difference"]])
    assert (alone.p <= one.p).all()
    assert alone.p.min() * 6 == pytest.approx(one.p.min())
    claimed = compared(results, table._replace(claims={(columns[0], "kv", "qkv"): 3.0}))
    assert claimed.p.dropna().tolist() == [alone.p[0]], "only what a claim is about is tested"
    assert (claimed.verdict != "").tolist() == [True] + [False] * 5
    pd.testing.assert_frame_equal(claimed[["low", "high", "difference"]], one[["low", "high", "difference"]])


def test_runs_that_solve_a_task_or_do_not_are_counted():
    results, table = made({"swap": {"qkv": [1.0] * 8, "kv": [1.0, 0.991, 0.2, 0.2, 0.98, 0.3, 0.1, 0.5]}})
    (line,) = found = comparisons(results, [table._replace(solved=["swap"], pools={})])
    assert (line.solved, line.solved_by_baseline, line.pairs) == (2, 8, 8)
    assert line.p == pytest.approx(2 / 2**6)
    assert line.verdict == "worse"
    assert "| 0 of 8 | solved 2 against 8 of 8, blocks 0 : 6 | 0.0312 |" in comparisons_table(found, table.kind)


def test_an_interval_is_clipped_to_what_a_difference_can_be():
    results, table = made({"s": {"qkv": [0.9, 0.2], "kv": [0.3, 0.7]}})
    (line,) = comparisons(results, [table._replace(pools={})])
    assert (line.low, line.high, line.smallest_margin) == (-1, 1, 1)


def test_attentions_are_compared_with_others_than_the_first_where_the_grid_asks(results, table):
    found = compared(results.assign(state=State.FINISHED), table._replace(pairs=[("kv+pos", "kv")]))
    for _, of_column in found.groupby("column"):
        differences = of_column.set_index(["attention", "baseline"]).difference
        expected = differences["kv+pos", "qkv"] - differences["kv", "qkv"]
        assert differences["kv+pos", "kv"] == pytest.approx(expected)


def test_what_learns_faster_is_better_over_training_though_both_end_alike():
    results, table = made({"s": {"qkv": [0.5, 0.5, 0.5], "kv": [0.5, 0.5, 0.5]}})
    courses = {name: [0.5, 0.5] for name in "012"} | {name: [0.6 + int(name) / 10, 0.5] for name in "345"}
    rows = [{"name": name, "val/acc": value} for name, both in courses.items() for value in both]
    slow = table._replace(metric="val/acc over training", over_training="val/acc", pools={})
    added = with_means(results, pd.DataFrame(rows), [table, slow])
    assert slow.title == "validation accuracy, mean over training"
    assert compared(added, slow).difference[0] == pytest.approx(0.25)
    assert compared(added, table._replace(pools={})).difference[0] == 0


def test_only_whole_pairs_count(results, table):
    lost = results.copy()
    one = lost.index[(lost.attention == "kv") & (lost.task == "sort")][0]
    lost.loc[one, "state"] = State.DIVERGED
    found = compared(lost, table).set_index(["column", "attention"])
    assert found.pairs["sort", "kv"] == 1
    assert found.pairs["sort", "kv+pos"] == found.pairs["sub", "kv"] == 2
    kv = next(line for line in cells(results_table(cells_of(lost, table), table)) if line[0] == "**KV**")
    assert kv[1].endswith("n = 1 of 4 (1 of 2 settings, 1 of 2 seeds, 1 diverged)"), "what diverged is not averaged in"
    assert found.verdict["sort", "kv"] == "runs lost"
    assert found.verdict["sort", "kv+pos"] == "too few seeds"


@pytest.mark.parametrize("value", [np.nan, inf])
def test_a_metric_that_is_no_finite_number_is_told_and_not_averaged_in(results, table, value):
    lost = results.copy()
    of_kv = (lost.attention == "kv") & (lost.state == State.FINISHED)
    one, *_ = lost.index[of_kv & (lost.task == "sort")]
    lost.loc[one, "test/acc"] = value
    lost.loc[of_kv & (lost.task == "sub"), "test/acc"] = value
    kv = next(line for line in cells(results_table(cells_of(lost, table), table)) if line[0] == "**KV**")
    assert kv[1].endswith("n = 1 of 4 (1 of 2 settings, 1 of 2 seeds, 1 without a finite value)")
    assert kv[2] == "no value (0 of 4, 2 without a finite value)"
    assert {*compared(lost, table).query("attention == 'kv'").column} == {"sort"}
    bars(lost, table)


@pytest.mark.parametrize("highest", [1.0, 0.0, -1.0])
def test_a_diverged_run_is_not_among_the_solved(results, table, highest):
    lost = results.copy()
    lost.loc[(lost.attention == "kv") & (lost.task == "sort"), "state"] = State.DIVERGED
    solving = table._replace(solved=("sort",), kind=replace(table.kind, highest=highest))
    found = compared(lost, solving).set_index(["column", "attention"])
    assert found.solved["sort", "kv"] == 0


def test_each_run_is_held_against_the_largest_class_of_its_own_split(results, table):
    """The splits of two seeds differ, and every run says the largest class of its split."""
    shares = results.seed.map({0: 0.9, 1: 0.75}).fillna(0.8)
    guessing = table._replace(chance=dict(zip(results.name, shares, strict=True)))
    found = compared(results.assign(**{"test/acc": shares.where(results.state == State.FINISHED)}), guessing)
    assert {*found.verdict} == {CHANCE}


def test_a_report_of_a_part_says_so(written):
    text = (written / "report.md").read_text()
    assert "24 runs: 12 to run, 12 finished" in text
    assert "The columns were exchanged." in text
    assert "Runs are missing" in text
    ended = "12 of 24 runs (50 %) have ended. Of 4 settings, 0 have all runs and 4 have at least one. Of 2 seeds, 1"
    assert ended in text.replace("\n", " ")
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures
    for picture in pictures:
        ElementTree.parse(written / picture)
    table = pd.read_csv(written / "runs.csv")
    assert len(table) == 24
    assert table["test/acc"].notna().sum() == 12


@pytest.mark.usefixtures("undrawn")
def test_a_report_says_which_runs_were_made_on_other_data(study, tmp_path):
    _, grid, _ = study
    text = {}
    for name, contents in {"alike": ["ab12"] * 24, "other": ["ab12"] * 23 + ["cd34"], "unknown": [None] * 24}.items():
        for run, content in zip(grid.runs, contents, strict=True):
            metrics = {"test/acc": 0.5 + 0.1 * run.seed, **({} if content is None else {"content": content})}
            finish(run, tmp_path / name, RESULT | METRICS | metrics)
        outcomes = read_outcomes(grid.runs, tmp_path / name)
        text[name] = write_report(grid, outcomes, tmp_path / "report")[0].read_text()
    task = grid.runs[-1].task
    assert f"Runs of {task} with equal data settings were trained on different data" in text["other"]
    assert "(11 runs on ab12; 1 run on cd34)" in text["other"]
    assert "differ (" not in text["alike"] + text["unknown"]


@pytest.mark.usefixtures("undrawn")
def test_a_report_says_below_each_table_which_data_are_not_the_published_ones(study, written, tmp_path):
    _, grid, _ = study
    run = grid.runs[0]
    what = "cifar10 has 5,000 in train instead of 50,000"
    finish(run, tmp_path / "runs", RESULT | METRICS | {"notes": {UNPUBLISHED: what}})
    text = write_report(grid, read_outcomes(grid.runs, tmp_path / "runs"), tmp_path / "report")[0].read_text()
    assert text.partition("## How to read")[0].count(f"**Not the published data**: {what}.") == 1
    assert "Not the published" not in (written / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_an_attention_that_has_not_run_yet_is_named_and_has_no_place_in_tables(study, tmp_path):
    """The grid of a record may grow: what was compared stays as it was, and the missing runs are counted."""
    _, grid, root = study
    path = tmp_path / "two.yaml"
    attentions = [{"attn": name} for name in ("qkv", "kv+pos", "kv")]
    attentions += [{"attn": "kv", "attn_kwargs": {"attend_self": False}}]
    axes = {name: values for name, values in GRID["axes"].items() if name != "attn"}
    grown = GRID | {"axes": axes | {"attention": attentions}, "pairs": [["kv, attend_self False", "kv"]]}
    path.write_text(yaml.safe_dump(grown, sort_keys=False))
    wider = read_grid(path, "paper")
    outcomes = read_outcomes(wider.runs, root)
    text, before = (
        write_report(asked, outcomes, tmp_path / name)[0].read_text() for name, asked in (("new", wider), ("old", grid))
    )
    assert "32 runs: 20 to run, 12 finished" in text
    assert "**Not run yet**: KV without self.\n" in text
    tables, comparisons = (re.findall(r"^\|.*\|$", report, re.MULTILINE) for report in (text, before))
    assert tables == comparisons
    one = next(run for run in wider.runs if run.attention == "kv, attend_self False")
    finish(one, root_of_one := tmp_path / "one", RESULT | METRICS)
    outcomes |= read_outcomes([one], root_of_one)
    text = write_report(wider, outcomes, tmp_path / "one more")[0].read_text()
    assert "Not run yet" not in text
    assert "| **KV without self** | 0.750, n = 1 of 4 (1 of 2 settings, 1 of 2 seeds) | not run (0 of 4) |" in text
    assert "KV without self − KV |" in text


@pytest.mark.usefixtures("undrawn")
def test_the_command_reports_a_scale_and_what_it_cuts(study, tmp_path, capsys):
    path, _, root = study
    command("study report", [str(path), "--scale", "small", "--folder", str(root), "--out", str(tmp_path / "mine")])
    files = [Path(file) for file in capsys.readouterr().out.split()]
    assert [file.name for file in files] == ["report.md", "tables.csv", "runs.csv"]
    text = files[0].read_text()
    assert "Scale **small**: A part. 12 runs: 6 to run, 6 finished." in text
    assert "| heads | 2 | 1, 2 |" in text
    assert "Our settings differ from the paper's" in text


@pytest.mark.usefixtures("undrawn")
def test_the_usual_tables_have_the_monitor_of_each_task_in_its_last_split(tmp_path):
    path, root = tmp_path / "grids" / "mixed.yaml", tmp_path / "runs"
    path.parent.mkdir()
    axes = {"attn": ["qkv", "kv"], "max_epochs": 1}
    path.write_text(yaml.safe_dump({"tasks": ["characters", "sort", "language_model"], "axes": axes, "seeds": [0]}))
    grid = read_grid(path)
    for run in grid.runs:
        test = {"test/acc": 0.6} if run.task == "sort" else {}
        finish(run, root, RESULT | {"val/loss": 1.0, "val/acc": 0.5} | test)
    found = tables_of(grid, read_outcomes(grid.runs, root))
    assert [(table.metric, [*table.columns]) for table in found] == [
        ("val/loss", ["characters", "language_model"]),
        ("test/acc", ["sort"]),
    ]
    assert "no test split: characters, language_model" in found[0].note
    assert not found[1].note
    write_report(grid, read_outcomes(grid.runs, root), tmp_path / "report")
    report = (tmp_path / "report" / "report.md").read_text()
    assert "no value" not in report
    assert {"differences-val-loss.svg", "bars-val-loss.svg"} <= {path.name for path in (tmp_path / "report").iterdir()}


def test_a_report_begins_with_published_numbers_beside_ours_and_with_pairs(written, results, table):
    title, scale, heading, shown, _, finding, *_ = (written / "report.md").read_text().split("\n\n")
    assert [title, heading] == ["# Two tasks", "## Test accuracy"]
    assert scale.startswith("Scale **paper**: All of it.")
    found = comparisons(results, [table])
    assert shown == results_table(cells_of(results, table), table, found)
    pairs = [line[1:3] for line in cells(shown) if line[0] == "better than QKV in"]
    assert sorted(chain(*pairs)) == sorted(f"{one.better_in} of 2" for one in found)
    assert finding == "In test accuracy: no verdict: 4 × too few seeds."


def test_a_summary_names_what_is_decided(results, table):
    level = results.assign(state=State.FINISHED, seed=results.seed.fillna(0))
    level["test/acc"] = 0.8 - 0.3 * (level.attention == "kv") + 0.001 * level.seed * (level.attention == "kv")
    (sentence,) = summary(table, comparisons(level, [table]))
    assert "**worse**: KV − QKV (sort -29.95), KV − QKV (sub -29.95); " in sentence
    assert "**as good**: KV+Pos − QKV (sort 0.00), KV+Pos − QKV (sub 0.00)." in sentence


def test_a_line_without_a_verdict_says_how_many_seeds_it_has(results, table):
    lines = cells(comparisons_table(comparisons(results, [table]), table.kind))
    assert {line[-1] for line in lines[1:]} == {"1 seed: no verdict"}


@pytest.mark.parametrize(("value", "verdict", "other"), [(1.0, CEILING, 0.5), (0.105, CHANCE, 0.12)])
def test_at_the_ceiling_and_at_chance_nothing_is_claimed(results, table, value, verdict, other):
    """Chance is guessing one of ten digits. One run that is elsewhere is enough for a verdict."""
    level = results.assign(**{"test/acc": [value if task == "sub" else 0.5 for task in results.task]})
    level["state"] = State.FINISHED
    found = comparisons(level, [table])
    assert {(one.column, one.verdict) for one in found} == {("sub", verdict), ("sort", "as good")}
    assert at_the_ceiling(found) == ("sub" if verdict == CEILING else "")
    assert all(np.isnan(one.low) for one in found if one.verdict == verdict)
    level.loc[(level.task == "sub") & (level.attention == "kv"), "test/acc"] = other
    found = comparisons(level, [table])
    assert [one.attention for one in found if one.verdict == verdict] == ["kv+pos"]
    assert at_the_ceiling(found) == ("sub (KV+Pos)" if verdict == CEILING else "")
    assert CHANCE not in {one.verdict for one in comparisons(level, [table._replace(chance={})])}


@pytest.mark.parametrize("metric", ["test/loss", "val/loss", "test/ppl"])
def test_models_at_chance_have_no_verdict_in_any_table(study, results, metric):
    """Nearly equal losses of models that have learned nothing would make any attention as good as any other."""
    _, grid, _ = study
    stage = metric.partition("/")[0]
    entries = [TableEntry(metric=f"{stage}/acc"), TableEntry(metric=metric)]
    tables = tables_of(replace(grid, file=replace(grid.file, tables=entries)))
    level = results.assign(**{f"{stage}/acc": [0.105 if task == "sub" else 0.5 for task in results.task], metric: 2.3})
    level["state"] = State.FINISHED
    found = comparisons(level, tables)
    assert {(one.table, one.column, one.verdict) for one in found} == {
        (table, *of_column) for table in (0, 1) for of_column in (("sub", CHANCE), ("sort", "as good"))
    }
    level.loc[(level.task == "sub") & (level.attention == "kv"), f"{stage}/acc"] = 0.12
    assert [one.attention for one in comparisons(level, tables[1:]) if one.verdict == CHANCE] == ["kv+pos"]


def test_all_numbers_of_the_tables_are_in_a_csv(written, results, table):
    numbers, expected = pd.read_csv(written / "tables.csv"), pd.DataFrame(cells_of(results, table))
    expected = expected.drop(columns="not_finite")  # of which there are none
    pd.testing.assert_frame_equal(numbers[expected.columns], expected)
    found = compared(results, table).drop(columns=["settings", "table"])
    both = found[["column", "attention"]].merge(numbers)[found.columns]
    pd.testing.assert_frame_equal(both, found.replace("", np.nan), check_dtype=False)


def test_steps_to_nearly_the_highest_value_are_medians_over_runs(table):
    """A run that never gets there counts as slower than any other."""
    rows = [
        {"name": f"{attention}{run}", "attention": attention, "step": step, "val/acc": value}
        for attention, firsts in {"qkv": (10, 20, 90), "kv": (30, inf, 30), "kv+pos": (10, inf, inf)}.items()
        for run, first in enumerate(firsts)
        for step in range(10, 101, 10)
        for value in [0.991 if step >= first else 0.98]
    ]
    histories = pd.DataFrame(rows)
    wide = table._replace(columns={"sort": frozenset(histories.name)})
    lines = cells(steps_table(histories, wide, ["sort"]))
    assert lines == [["", "sort"], ["**QKV**", "20"], ["**KV**", "30"], ["**KV+Pos**", "–"]]
    assert steps_table(histories.drop(columns="val/acc"), wide, ["sort"]) is None


def test_undecided_has_the_smallest_margin_within_which_it_is_not(table):
    """With just more than this margin the same runs are as good, with just less they are not."""
    accuracy = np.random.default_rng(1).uniform(0.4, 0.6, 16)
    results = pd.DataFrame(product(("qkv", "kv"), range(8)), columns=["attention", "seed"])
    about = {"task": "sort", "setting": "", "state": State.FINISHED, "test/acc": accuracy}
    results = results.assign(name=results.index.map(str), **about)
    wide = table._replace(columns={"sort": frozenset(results.name)})
    (found,) = comparisons(results, [wide])
    points = found.smallest_margin / wide.kind.point
    assert f"undecided, ± {points:.2f}" in comparisons_table([found], wide.kind)
    for factor, verdict in ((1.001, "as good"), (0.999, "undecided")):
        assert [*compared(results, wide._replace(margin=points * factor)).verdict] == [verdict]


def test_the_forest_draws_each_comparison_that_is_not_at_the_ceiling(results, table):
    found = comparisons(results.assign(state=State.FINISHED), [table])
    easy, counted = ([one._replace(**other) for one in found] for other in ({"verdict": CEILING}, {"solved": 1.0}))
    (axes,) = forest([*found, *easy, *counted], table, "qkv").axes
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == pytest.approx([one.difference / 0.01 for one in found])
    words = [verdict_in_words(one, table.kind) for one in found]
    assert [text.get_text().strip() for text in axes.texts] == words
    assert forest(easy, table, "qkv") is None


TABLE = {"metric": "test/acc"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tables": [{"metric": "test/accuracy"}]}, "'test/acc'"),
        ({"tables": [TABLE | {"columns": {"wide": {"dims": 16}}}]}, "'dim'"),
        ({"tables": [TABLE | {"columns": {"wide": {"heads": 3}}}]}, "wide.*3"),
        ({"tables": [TABLE | {"columns": ["sort", "sbu"]}]}, "'sub'"),
        ({"tables": [TABLE | {"published": {"kv+po": {}}}]}, "'kv[+]pos'"),
        ({"tables": [TABLE | {"published": {"kv": {"srot": 0.5}}}]}, "'srot'"),
        ({"tables": [TABLE | {"pools": {"both": ["sort", "sbu"]}}]}, "'sbu'"),
        ({"pairs": [["kv", "qvk"]]}, "'qvk'"),
        ({"tables": [TABLE | {"claims": [{"scale": "big", "column": "sort", "pairs": [["kv", "qkv"]]}]}]}, "'big'"),
        ({"curves": [["val/los"]]}, "'val/loss'"),
    ],
)
def test_names_in_tables_and_curves_that_the_grid_does_not_have_are_told(study, changes, named):
    grid = other_grid(study[0], "small", **changes)
    with pytest.raises(UserError, match=named):
        (curves_of if "curves" in changes else tables_of)(grid)


def test_names_of_other_scales_are_known(study):
    """A column that this scale does not run is left out, unless it has published numbers."""
    published = {"kv": {"one head": 0.5}}
    columns = {"one head": {"heads": 1}, "two": {"heads": 2}, "one again": {"heads": 1}}
    grid = other_grid(study[0], "small", tables=[TABLE | {"columns": columns, "published": published}])
    (table,) = tables_of(grid)
    assert {column: len(runs) for column, runs in table.columns.items()} == {"one head": 0, "two": 12}
    fewer = {"paper": None, "small": {"tasks": ["sort"], "axes": {"attn": "kv"}}}
    (table,) = tables_of(other_grid(study[0], "small", scales=fewer))
    assert [*table.columns] == ["sort"]


def other_grid(path, scale, **changes):
    other = path.with_name("other.yaml")
    other.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
    return read_grid(other, scale)


@pytest.mark.usefixtures("undrawn")
def test_curves_are_those_that_the_grid_asks_for(study, tmp_path):
    path, _, root = study
    grid = other_grid(path, "paper", curves=[["train/loss"], ["val/acc"]])
    write_report(grid, read_outcomes(grid.runs, root), tmp_path)
    pictures = {path.stem for path in tmp_path.glob("*.svg")}
    assert pictures >= {"train-loss"}
    assert not pictures & {"val-loss", "val-acc"}, "of the second there is nothing to draw"


@pytest.mark.slow
def test_for_a_paper_there_are_pictures_as_pdf(study, written, tmp_path):
    path, _, root = study
    words = ["--folder", str(root), "--out", str(tmp_path), "--format", "pdf"]
    command("study report", [str(path), "--scale", "paper", *words])
    one, before = ({file.name: file.read_bytes() for file in out.iterdir()} for out in (tmp_path, written))
    pictures = {name.replace(".svg", ".pdf") for name in before if name.endswith(".svg")}
    assert all(one[name] == content for name, content in before.items()), "the same every time"
    assert one.keys() - before.keys() == pictures
    assert pictures
    assert all(one[name].startswith(b"%PDF") for name in pictures)
