"""A record keeps what runs gave, whatever their folders are called, and grows."""

import json
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.reports.report import write_report
from kvt.study import records
from kvt.study.grid import Grid, read_grid
from kvt.study.outcomes import State, read_outcomes
from kvt.study.records import find_outcomes, read_record, widen_record
from kvt.system import write_atomically
from tests.helpers.drivers import METRICS, RESULT, finish, write_run
from tests.study.test_command import TINY, kvt

pytestmark = pytest.mark.usefixtures("undrawn")
RUNS, KEPT = Path("runs"), Path("kept")


def read(name: str = "tiny", **changes) -> Grid:
    """Write a grid like `TINY` and read it."""
    path = Path(f"{name}.yaml")
    path.write_text(yaml.safe_dump(TINY | changes))
    return read_grid(path)


@pytest.fixture
def grid(in_tmp_dir):
    """A study of two runs that have ended, the second by diverging."""
    grid = read()
    finish(grid.runs[0], RUNS)
    finish(grid.runs[1], RUNS, RESULT | METRICS | {"diverged": "train/loss is nan"})
    return grid


@pytest.fixture
def other(grid):
    """The record of another study, one of whose two runs has finished."""
    another = read("another", seeds=[5])
    finish(another.runs[0], Path("others"))
    widen_record(another, Path("other"), [Path("others")])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_record_holds_what_the_runs_gave(grid):
    """And a report drawn from it alone is the same."""
    kvt("study record tiny.yaml --out kept --from runs")
    theirs, ours = read_outcomes(grid.runs, RUNS), find_outcomes(grid.runs, [KEPT])
    reports = [write_report(grid, outcomes, Path("report"))[0].read_bytes() for outcomes in (theirs, ours)]
    assert reports[0] == reports[1]
    for run in grid.runs:
        ((before,), (after,)) = theirs[run.name], ours[run.name]
        assert after[:2] == before[:2]
        assert after.config.flat == before.config.flat
        assert {name: after.result[name] for name in before.result} == before.result
        pd.testing.assert_frame_equal(after.history, before.history, check_dtype=False)


def test_results_are_found_by_configuration_whatever_the_folders_are_called(grid):
    shutil.move(grid.runs[0].folder(RUNS), RUNS / "older" / "name")
    older = json.loads((RUNS / "older" / "name" / "result.json").read_text())
    del older["config"]["data"]["init_args"]["length"]  # an argument that came later, with this default
    older["config"]["data"]["init_args"]["data_dir"] = "elsewhere"
    write_run(RUNS / "older" / "name", older)
    other = read_grid("table2", "smoke").runs[0]
    finish(other, RUNS)
    found = find_outcomes(grid.runs, [RUNS])
    assert {name: len(outcomes) for name, outcomes in found.items()} == {run.name: 1 for run in grid.runs}
    assert [len(find_outcomes([other], [RUNS])[other.name]), *map(len, found.values())] == [1, 1, 1]


def test_a_run_that_continued_from_a_checkpoint_is_no_run_of_a_grid(grid):
    continued = grid.runs[0].config.as_dict() | {"ckpt_path": "elsewhere/last.ckpt"}
    write_run(RUNS / "continued", RESULT | METRICS | {"config": continued, "test/acc": 0.99})
    (only,) = find_outcomes(grid.runs, [RUNS])[grid.runs[0].name]
    assert only.result["test/acc"] == METRICS["test/acc"]


def test_a_record_grows_and_keeps_the_order_of_the_grid(grid):
    shutil.copytree(RUNS, "second")
    shutil.rmtree(grid.runs[0].folder(RUNS))
    assert widen_record(grid, KEPT, [RUNS]) == "kept: 1 of 2 runs, 0 repeated; 1 added"
    assert widen_record(grid, KEPT, [Path("second")]) == "kept: 2 of 2 runs, 0 repeated; 1 added"
    record = read_record(KEPT)
    assert [row.name for row in record.rows] == [run.name for run in grid.runs]
    assert [(addition["commit"], addition["runs"]) for addition in record.added] == [("unknown", 1)] * 2
    before = content(KEPT)
    assert widen_record(grid, KEPT, [RUNS, KEPT, RUNS]) == "kept: 2 of 2 runs, 0 repeated; 0 added"
    assert content(KEPT) == before, "what is there already is not written again"
    widen_record(grid, Path("at once"), [Path("second")])
    assert content(Path("at once"))["results.csv"] == before["results.csv"]


def test_a_run_made_again_is_kept_beside_the_first_and_reported_with_its_difference(in_tmp_dir):
    """Identical is what has the same metrics to six digits, whatever metrics other tasks have."""
    two = read(tasks=["sort", "copy"])
    qkv, kv = (run for run in two.runs if run.task == "sort")
    copy = next(run for run in two.runs if run.task == "copy")
    later = METRICS | {"started": "2026-02-01T00:00:00+00:00"}
    finish(qkv, Path("first"), RESULT | METRICS | {"val/loss": 0.123457})
    finish(qkv, Path("again"), RESULT | later | {"val/loss": 0.12345678})
    finish(kv, Path("first"))
    finish(kv, Path("again"), RESULT | later | {"test/acc": 0.77})
    finish(copy, Path("first"))
    finish(copy, Path("again"), RESULT | later | {"val/loss": 1.751, "val/ppl": 2.0})
    widen_record(two, KEPT, [Path("first")])
    assert widen_record(two, KEPT, [Path("again")]) == "kept: 3 of 4 runs, 3 repeated; 3 added"
    outcomes = find_outcomes(two.runs, [KEPT])
    assert [one.result["test/acc"] for one in outcomes[kv.name]] == [0.75, 0.77]
    text = write_report(two, outcomes, Path("report"))[0].read_text()
    assert "| sort | 2 | 1 | +1.00 | 2.00 |" in text
    assert "| copy | 1 | 0 | 0.00 | 0.00 |" in text
    assert "0.750" in text
    assert "0.770" not in text


def test_runs_that_a_grid_no_longer_has_stay(grid):
    widen_record(grid, KEPT, [RUNS])
    smaller = read(seeds=[0, 1], axes=TINY["axes"] | {"attn": ["kv"]})
    finish(smaller.runs[1], RUNS)
    assert widen_record(smaller, KEPT, [RUNS]) == "kept: 2 of 2 runs, 0 repeated; 1 added"
    assert [row.name for row in read_record(KEPT).rows] == [*(run.name for run in smaller.runs), grid.runs[0].name]


def test_recorded_runs_count_as_done(grid, capsys):
    widen_record(grid, KEPT, [RUNS])
    kvt("study run tiny.yaml --folder elsewhere --from kept")
    assert capsys.readouterr().out == "2 runs: 1 finished, 1 diverged\n"
    assert not Path("elsewhere").exists()


def test_a_record_has_every_validation_and_at_most_100_other_points_of_a_run(in_tmp_dir):
    """So that the mean over training and the first step at 99 % are those of the run."""
    axes = TINY["axes"] | {"lr": [n / 1e6 for n in range(1, 26)]}
    grid, rng = read(axes=axes), np.random.default_rng(0)
    steps = np.arange(1, 1001)
    for run in grid.runs:
        loss, validated = rng.uniform(size=1000), np.where(steps % 4 == 0, rng.uniform(size=1000), np.nan)
        columns = {"step": steps, "seconds": steps / 7, "train/loss": loss, "val/loss": validated}
        finish(run, RUNS, RESULT | {"test/acc": rng.uniform()}, pd.DataFrame(columns).to_csv(index=False))
    widen_record(grid, KEPT, [RUNS])
    for row in read_record(KEPT).rows:
        history = row.outcome.history
        assert 250 + 90 <= len(history) <= 250 + 100
        assert history["val/loss"].count() == 250
        assert history["step"].max() == history.dropna()["step"].max() == 1000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return read_grid(path)


@settings(max_examples=20)
@given(st.text(max_size=20), st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=9))
def test_texts_come_back_as_they_were(tiny, tmp_path_factory, text, name):
    grid, folder = tiny, tmp_path_factory.mktemp("texts")
    said = {"notes": {"bleu": text}, "precision": text, "diverged": text, "packages": {f"x{name}": text}}
    finish(grid.runs[0], folder / "runs", RESULT | said)
    widen_record(grid, folder / "kept", [folder / "runs"])
    (row,) = read_record(folder / "kept").rows
    assert {key: row.outcome.result[key] for key in said} == said
    assert row.outcome.state == State.DIVERGED


def test_no_class_of_a_stranger_is_imported(grid, monkeypatch):
    Path("stranger.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.syspath_prepend(".")
    config = grid.runs[0].config.as_dict()
    config["model"]["class_path"] = "stranger.Task"
    write_run(RUNS / "other", RESULT | METRICS | {"config": config})
    assert [len(outcomes) for outcomes in find_outcomes(grid.runs, [RUNS]).values()] == [1, 1]
    assert "stranger" not in sys.modules


class Killed(BaseException):
    pass


@pytest.mark.parametrize("count", range(3))
def test_a_record_is_readable_whenever_its_writer_is_killed(grid, monkeypatch, count):
    """After any number of its three files; and the next process completes it."""
    widen_record(grid, KEPT, [RUNS])
    more, left = read(seeds=[0, 1]), count
    for run in more.runs:
        finish(run, Path("more"))

    def killed(path, text):
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        write_atomically(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(records, "write_atomically", killed)
        with pytest.raises(Killed):
            widen_record(more, KEPT, [Path("more")])
    assert [row.name for row in read_record(KEPT).rows] == [run.name for run in grid.runs]
    widen_record(more, KEPT, [Path("more")])
    assert len(read_record(KEPT).rows) == 5, "four runs, one of which was made again with another result"


def test_processes_that_widen_a_record_at_once_lose_nothing(grid):
    more = read(seeds=[0, 1, 2, 3], axes=TINY["axes"] | {"attn": ["kv"]})
    fork = get_context("fork")
    ready = fork.Barrier(len(more.runs))

    def widen(folder: Path) -> None:
        ready.wait()
        widen_record(more, KEPT, [folder])

    others = [fork.Process(target=widen, args=[finish(run, Path(run.name)).parents[2]]) for run in more.runs]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0] * 4
    assert {row.name for row in read_record(KEPT).rows} == {run.name for run in more.runs}


SPOILED = {
    "results.csv": (b",parameters,", b",weights,"),
    "record.yaml": (b"grid:", b"grids:"),
    "histories.csv.gz": (b"\x1f\x8b", b"no"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_record_is_one_line_and_nothing_is_written(grid, mistake, name):
    widen_record(grid, KEPT, [RUNS])
    (KEPT / name).write_bytes((KEPT / name).read_bytes().replace(*SPOILED[name]))
    before = content(KEPT)
    for words in ("record tiny.yaml --out kept --from runs", "run tiny.yaml --from kept"):
        assert f"kept/{name}" in mistake(lambda words=words: kvt(f"study {words}"))
    assert content(KEPT) == before


def test_a_damaged_run_among_others_is_told_and_left_out(grid, capfd):
    Path("runs/damaged/x").mkdir(parents=True)
    Path("runs/damaged/x/result.json").write_text("{")
    Path("runs/damaged/y/result.json").mkdir(parents=True)
    kvt("study record tiny.yaml --out kept --from runs")
    kvt("study report tiny.yaml --out report --from runs")
    assert len(read_record(KEPT).rows) == len(grid.runs)
    told = capfd.readouterr().err
    assert [told.count(f"damaged/{name} is left out: result.json") for name in "xy"] == [2, 2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("record tiny.yaml --out kept --from empty", "empty"),
        ("record tiny.yaml --out kept --from empty other", "other"),
        ("record tiny.yaml --out tiny.yaml --from runs", "--out tiny.yaml"),
        ("record tiny.yaml tiny.yaml --out kept", "--out"),
        ("record tiny.yaml --out other --from runs", "other"),
        ("report tiny.yaml --from other", "other"),
    ],
)
@pytest.mark.usefixtures("other")
def test_mistakes_are_one_line_and_nothing_is_written(mistake, words, named):
    Path("empty").mkdir()
    assert named in mistake(lambda: kvt(f"study {words}"))
