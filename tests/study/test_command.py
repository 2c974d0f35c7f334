"""`kvt study` and `kvt reproduce`: what they print before the work, and how they refuse mistakes."""

import re
from pathlib import Path

import pytest
import yaml

from kvt.commands import command_parser, execute
from kvt.study.grid import read_grid
from kvt.system import GRIDS, run, yaml_names

TINY = {
    "tasks": ["sort"],
    "axes": {
        **{"dim": 16, "depth": 1, "batch_size": 16, "train_size": 32, "val_size": 16, "test_size": 16},
        **{"max_epochs": 1, "attn": ["qkv", "kv"]},
    },
    "seeds": [0],
    "scales": {"all": None},
}

VERDICT = "In test accuracy: no verdict: 1 × both at chance."


@pytest.fixture
def tiny(in_tmp_dir):
    """A working directory with nothing but a grid of two runs."""
    (in_tmp_dir / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return in_tmp_dir


def kvt(words: str) -> None:
    name, *flags = words.removeprefix("study ").split()
    run(lambda: execute(f"study {name}" if words.startswith("study") else name, flags))


def test_a_dry_run_sums_up_each_task_and_makes_nothing(tiny, capsys):
    more = {"tasks": ["sort", "copy"], "axes": {**TINY["axes"], "lr": [1e-3, 1e-2]}, "seeds": [0, 1]}
    (tiny / "tiny.yaml").write_text(yaml.safe_dump(TINY | more))
    kvt("study run tiny.yaml --dry_run --workers=1")
    first, *tasks, last = capsys.readouterr().out.splitlines()
    assert first == "16 runs: 16 to run"
    assert tasks == [f"{name}  8 of 8 runs to do, unknown time" for name in ("sort", "copy")]
    assert last == "16 to run: unknown time with 1 worker"
    assert [path.name for path in tiny.iterdir()] == ["tiny.yaml"]


def test_runs_are_listed(tiny, capsys):
    kvt("study run tiny.yaml --list")
    listed = re.sub(r" \w{12} ", " ", capsys.readouterr().out).splitlines()
    assert listed == ["2 runs: 2 to run", "to run     sort qkv seed=0", "to run     sort kv seed=0"]
    assert [path.name for path in tiny.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("study run table2 --scale=smoke --list --only task=sort", 12),
        ("study run table2 --scale=smoke --list", 60),
        ("study run figure5 --scale=notebook --list --only seed=0 attn=kv attn_kwargs=null", 1),
        ("reproduce figure3 table1 --scale=smoke --list", 15),
        ("reproduce table2 table3 --scale=smoke --list --only task=copy attn=kv", 4),
    ],
)
def test_grids_of_the_package_need_no_checkout(in_tmp_dir, capsys, words, count):
    kvt(words)
    assert capsys.readouterr().out.startswith(f"{count} runs: {count} to run\n")
    assert not [*in_tmp_dir.iterdir()]


def test_a_setting_of_a_grid_is_changed_for_all_of_its_runs(tiny, capsys):
    kvt("study run tiny.yaml --set norm=post dim=[16,32] --list")
    listed = capsys.readouterr().out
    (tiny / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"axes": {**TINY["axes"], "norm": "post", "dim": [16, 32]}}))
    kvt("study run tiny.yaml --list")
    assert listed == capsys.readouterr().out


def test_a_grid_is_printed_to_be_edited(tiny, capsys):
    kvt("study run table2 --print_grid")
    (tiny / "mine.yaml").write_text(capsys.readouterr().out)
    ours, theirs = (read_grid(name, "smoke").runs for name in ("mine.yaml", "table2"))
    assert [run.name for run in ours] == [run.name for run in theirs]


@pytest.mark.slow
def test_what_is_finished_is_left_alone_and_gives_the_time_of_the_rest(tiny, capsys):
    kvt("study run tiny.yaml --workers=2")
    assert "2 runs: 2 finished\n" in capsys.readouterr().out
    results = sorted(tiny.rglob("result.json"))
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in results]
    assert len(before) == 2
    kvt("study run tiny.yaml --workers=2")
    assert capsys.readouterr().out.splitlines() == ["2 runs: 2 finished", VERDICT]
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in results] == before
    (tiny / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"seeds": [0, 1]}))
    kvt("study run tiny.yaml --dry_run")
    said = capsys.readouterr().out
    assert said.startswith("4 runs: 2 to run, 2 finished")
    assert re.search(r"sort  2 of 4 runs to do, about 0:00:0\d", said)
    assert re.search(r"2 to run: about 0:00:0\d", said)
    for path in results:
        assert not (path.parent / "checkpoints" / "last.ckpt").exists()
        assert (path.parent / "checkpoints" / "best.ckpt").is_file()


def test_the_help_of_reproduce_names_every_grid():
    _, parser = command_parser("reproduce")
    text = "".join(parser.format_help().split())  # a name may be cut at its hyphen
    assert all(name in text for name in yaml_names(GRIDS))


def test_a_table_without_runs_is_told(in_tmp_dir, capsys):
    kvt("reproduce table1 --dry_run")
    assert capsys.readouterr().out.startswith("table1 has no runs")


@pytest.mark.slow
def test_a_run_with_a_callback_is_the_run_that_its_grid_asks_for(in_tmp_dir, says):
    callback = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss", "patience": 7}}
    sizes = {"dim": 8, "depth": 1, "train_size": 32, "val_size": 16, "test_size": 16, "batch_size": 16, "max_epochs": 1}
    axes = {"attn": "kv", "callbacks": [[callback]], **sizes, "accelerator": "cpu"}
    Path("stops.yaml").write_text(yaml.safe_dump({"tasks": {"sort": None}, "axes": axes, "seeds": [0]}))
    assert any("1 finished" in line for line in says("study", "run", "stops.yaml", "--workers", "1"))
