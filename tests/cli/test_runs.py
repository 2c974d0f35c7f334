"""Runs are listed by what their folders say, whoever made them, the best of each task first."""

from pathlib import Path

import pytest
import yaml

from kvt.run.config import RunConfig
from tests.helpers.drivers import METRICS, RESULT, hold, write_run

LOGS = Path("lightning_logs")


def make(name: str = "version_0", task: str = "sort", result=RESULT | METRICS, **settings) -> Path:
    """Write the files of a run that has finished, of kvt's own task."""
    config = RunConfig.from_name(task).changed(**settings)
    folder = LOGS / task / config.model["init_args"]["attn"].rpartition(".")[2] / name
    write_run(folder, result | {"config": config.as_dict(), "task": task})
    (folder / "config.yaml").write_text(yaml.safe_dump(config.as_dict()))
    return folder


def listed(says, *words) -> dict[str, str]:
    """Return the lines of the list by the name of the run's folder, in order."""
    return {Path(line.split()[0]).name: line for line in says("runs", *words)[1:]}


def test_a_line_has_folder_task_attention_what_differs_state_and_score(says):
    accuracy = {"monitor": "val/acc", "better": {"acc": "more"}}
    make("a", result=RESULT | METRICS | accuracy | {"val/acc": 0.5}, dim=32)
    make("b", result=RESULT | METRICS | accuracy | {"val/acc": 0.75})
    make("c", task="reverse", result=RESULT | {"val/loss": 0.25}, attn="qkv", lr=0.5)
    begun = make("d")
    (begun / "result.json").unlink()
    dims = [str(RunConfig.from_name(task).model["init_args"]["dim"]) for task in ("reverse", "sort")]
    head, *lines = says("runs")
    assert [line.split() for line in (head, *lines)] == [
        ["folder", "task", "attn", "dim", "state", "score"],
        ["lightning_logs/reverse/qkv/c", "reverse", "qkv", dims[0], "finished", "val/loss", "0.2500"],
        ["lightning_logs/sort/kv/b", "sort", "kv", dims[1], "finished", "val/acc", "0.7500"],
        ["lightning_logs/sort/kv/a", "sort", "kv", "32", "finished", "val/acc", "0.5000"],
        ["lightning_logs/sort/kv/d", "sort", "kv", dims[1], "stopped"],
    ], "of other tasks other settings differ"
    assert says("runs", "lightning_logs", "lightning_logs/sort") == [head, *lines]
    assert [*listed(says, "lightning_logs/reverse")] == ["c"]


@pytest.mark.parametrize(("better", "order"), [("less", "cbad"), ("more", "abcd"), (None, "abcd")], ids=str)
def test_a_score_that_is_not_finite_is_last_and_diverged_stands_beside_it(says, better, order):
    declared = {"better": {"loss": better} if better else {}}
    for name, loss in zip("abc", (3.0, 2.0, 1.0), strict=True):
        make(name, result=RESULT | METRICS | declared | {"val/loss": loss})
    make("d", result=RESULT | METRICS | declared | {"val/loss": float("nan"), "diverged": "train/loss is nan"})
    lines = listed(says)
    assert "".join(lines) == order
    assert lines["d"].split()[-3:] == ["diverged", "val/loss", "nan"]


def test_a_run_that_is_being_made_is_running(says):
    folder = make()
    (folder / "result.json").unlink()
    end = hold(folder)
    assert "running" in listed(says)["version_0"]
    end()
    assert "stopped" in listed(says)["version_0"]


def test_one_spoiled_run_does_not_stop_the_list(says):
    sound, spoiled = make("a"), make("b")
    (spoiled / "result.json").write_text('{"seed": ')
    lines = listed(says)
    assert {*lines} == {sound.name, spoiled.name}
    assert "finished" in lines["a"]
    assert "failed" in lines["b"]
