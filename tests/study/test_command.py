"""What `kvt study` and `kvt reproduce` say before anything is made, and to mistakes."""

import json
import re

import pytest
import yaml

from kvt.cli.main import COMMANDS, execute, main
from kvt.study import run as work
from kvt.study import runner as study
from kvt.system.console import run
from tests.conftest import REPOSITORY

TINY = {
    "tasks": ["sort"],
    "axes": {
        **{"dim": 16, "depth": 1, "batch_size": 16, "train_size": 32, "val_size": 16, "test_size": 16},
        **{"max_epochs": 1, "attn": ["qkv", "kv"]},
    },
    "seeds": [0],
    "scales": {"all": None},
}


@pytest.fixture
def checkout(in_tmp_dir):
    """A working directory as of a checkout, with a grid of two runs."""
    (in_tmp_dir / "experiments").symlink_to(REPOSITORY / "experiments")
    (in_tmp_dir / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return in_tmp_dir


def kvt(*words: str) -> None:
    name = " ".join(words[: 2 if words[0] == "study" else 1])
    run(lambda: execute(name, words[len(name.split()) :]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study run"], "name a grid"),
        (["study run", "table9.yaml"], "table9.yaml: no such grid"),
        (["study run", "tiny.yaml", "--scale", "al"], "did you mean 'all'?"),
        (["study run", "tiny.yaml", "--scale", "all", "--runs", "3"], "--runs 3: it is 2 runs"),
        (["study run", "tiny.yaml", "--scale", "all", "--workers", "0"], "workers=0"),
        (["study run", "tiny.yaml", "--scale", "all", "--worker", "1"], "--worker"),
        (["study report", "tiny.yaml", "--scale", "all", "--margin", "-1"], "margin=-1"),
        (["study report", "tiny.yaml", "tiny.yaml", "--scale", "all", "--out", "x"], "--out takes the report of one"),
        (["reproduce"], "name what to make, or --all: table1, figure3"),
        (["reproduce", "table4"], "unknown table or figure 'table4': did you mean"),
        (["reproduce", "table2", "--scale", "huge"], "table2.yaml: unknown --scale 'huge'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_and_leave_nothing_behind(checkout, mistake, words, message):
    assert message.lower() in mistake(lambda: run(lambda: execute(words[0], words[1:]))).lower()


@pytest.mark.parametrize("words", [["study"], ["study", "rum"], ["study", "--help"]])
def test_half_a_command_is_asked_for_the_other_half(mistake, monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["kvt", *words])
    assert mistake(main) == "error: kvt study: run or report?"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("run --folder file", "--folder"),
        ("run --folder file/below --dry_run", "--folder"),
        ("run --folder /proc/kvt", "--folder"),
        (f"run --folder {'a' * 300} --dry_run", "--folder"),
        ("report --folder file", "--folder"),
        ("report --folder file --out there", "--folder"),
        ("report --out file", "--out"),
        ("report --out file/below", "--out"),
    ],
)
def test_a_folder_that_cannot_be_one_is_named_before_the_work(checkout, mistake, words, flag):
    (checkout / "file").touch()
    command, *flags = words.split()
    error = mistake(lambda: kvt("study", command, "tiny.yaml", "--scale", "all", *flags))
    assert error.startswith(f"error: {flag} ")


def test_a_folder_without_locks_is_named_before_the_work(checkout, capsys, monkeypatch):
    def no_lock(*args, **kwargs):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(work, "FileLock", no_lock)
    with pytest.raises(SystemExit):
        kvt("study", "run", "tiny.yaml", "--scale", "all")
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: --folder ")
    assert "no locks here" in error


@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_tables_are_checked_before_the_work(checkout, mistake, flags):
    (checkout / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"tables": [{"metric": "test/ac"}]}))
    assert "unknown metric in tables of tiny" in mistake(
        lambda: kvt("study", "run", "tiny.yaml", "--scale", "all", *flags)
    )


def test_ctrl_c_while_workers_are_looked_for_is_one_line(checkout, capsys, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "_engine", interrupted)
    with pytest.raises(SystemExit) as ended:
        kvt("study", "run", "tiny.yaml", "--scale", "all")
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines() == ["stopped: the same command goes on"]


def test_reproduce_needs_the_grids(in_tmp_dir, mistake):
    assert "run this in a checkout" in mistake(lambda: kvt("reproduce", "table2"))


def test_a_dry_run_on_a_fresh_machine_sums_up_each_task_and_makes_nothing(checkout, capsys):
    more = {"tasks": ["sort", "copy"], "axes": {**TINY["axes"], "lr": [1e-3, 1e-2]}, "seeds": [0, 1]}
    (checkout / "tiny.yaml").write_text(yaml.safe_dump(TINY | more))
    kvt("study", "run", "tiny.yaml", "--scale", "all", "--dry_run", "--runs", "16", "--workers", "1")
    said = capsys.readouterr()
    first, heading, *tasks, last = said.out.splitlines()
    assert first == "16 runs: 16 to run"
    assert heading.split() == ["runs", "finished", "diverged", "failed", "damaged", "to", "do", "time"]
    times = []
    for name, line in zip(["sort", "copy"], tasks, strict=True):
        assert re.fullmatch(rf"{name} +8( +0){{4}} +8 +about 0:\d\d:\d\d", line), line
        times.append(line.split()[-1])
    assert times[0] == times[1] != "0:00:00", "the shapes of their runs are the same"
    assert re.fullmatch(r"16 to make, in about 0:\d\d:\d\d with 1 worker", last)
    assert " 0/2 " in said.err, "of sixteen runs two are timed"
    assert sorted(path.name for path in checkout.iterdir()) == ["experiments", "tiny.yaml"]


def test_runs_are_listed_where_that_is_asked_for(checkout, capsys):
    kvt("study", "run", "tiny.yaml", "--list")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 runs: 2 to run"
    assert [re.sub(r" \w{12} ", " ", line) for line in lines] == [
        "to run     sort qkv seed=0",
        "to run     sort kv seed=0",
    ]
    assert not (checkout / "lightning_logs").exists()


@pytest.mark.slow
def test_what_is_finished_is_left_alone_and_tells_how_long_the_rest_takes(checkout, capsys):
    kvt("study", "run", "tiny.yaml", "--scale", "all", "--workers", "2")
    assert capsys.readouterr().out.count("finished sort") == 2
    results = sorted(checkout.rglob("result.json"))
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in results]
    assert len(before) == 2
    kvt("study", "run", "tiny.yaml", "--scale", "all", "--workers", "2")
    assert capsys.readouterr().out.splitlines() == ["2 runs: 2 finished"]
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in results] == before
    (checkout / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"seeds": [0, 1]}))
    kvt("study", "run", "tiny.yaml", "--scale", "all", "--dry_run")
    said = capsys.readouterr().out
    assert said.startswith("4 runs: 2 to run, 2 finished")
    assert re.search(r"sort +4 +2 +0 +0 +0 +2 +about 0:00:0\d", said)
    assert re.search(r"2 to make, in about 0:00:0\d", said)


@pytest.mark.slow
def test_a_result_says_what_it_was_made_with(checkout):
    kvt("study", "run", "tiny.yaml", "--scale", "all")
    for path in checkout.rglob("result.json"):
        result = json.loads(path.read_text())
        assert {"kvt", "torch", "lightning"} <= result["packages"].keys()
        assert {"commit", "machine", "precision", "started", "finished", "config"} <= result.keys()
        assert not (path.parent / "checkpoints" / "last.ckpt").exists()
        assert (path.parent / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_a_study_makes_the_run_that_the_script_makes(checkout, experiment):
    kvt("study", "run", "tiny.yaml", "--scale", "all", "--workers", "1")
    studied = {(r := json.loads(path.read_text()))["attn"]: r for path in checkout.rglob("result.json")}
    small = [f"--{name}={value}" for name, value in TINY["axes"].items() if name != "attn"]
    for attn in ("qkv", "kv"):
        alone = experiment("sort", "--attn", attn, *small)
        for name in ("val/loss", "val/acc", "test/loss", "test/acc", "parameters"):
            assert studied[attn][name] == alone[name]


def test_commands_of_two_words_are_found(monkeypatch, capsys):
    assert {"study run", "study report", "reproduce"} <= COMMANDS.keys()
    monkeypatch.setattr("sys.argv", ["kvt", "study", "run", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "which of the grid's scales" in capsys.readouterr().out
