"""Runs that fail, studies that share a folder, files that break, disks that fill up."""

import json
import subprocess

import pytest

from kvt.study.workers import ATTEMPTS
from tests.study.drivers import Study

OWN = """
import os, signal
from kvt.attention import KV

class Deadly(KV):
    def forward(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

class Wrong(KV):
    def forward(self, *args, **kwargs):
        raise RuntimeError("this attention does\\nnot work")
"""


@pytest.fixture
def with_failures(study) -> Study:
    """A study of one good attention and two bad ones, and a run that diverges."""
    (study.root / "own.py").write_text(OWN)
    attentions = ["own.Deadly", "own.Wrong", "kv"]
    study.write_grid({"sort": None, "reverse": {"attn": "kv", "lr": 1e30}}, attn=attentions)
    return study


def test_what_fails_or_diverges_is_recorded_and_the_study_goes_on(with_failures, uninterrupted):
    study = with_failures
    printed = study.run(code=1)
    (deadly,) = study.folder.glob("sort/Deadly/*/failure.json")
    (wrong,) = study.folder.glob("sort/Wrong/*/failure.json")
    (good,) = study.folder.glob("sort/kv/*/result.json")
    (diverged,) = study.folder.glob("reverse/kv/*/result.json")
    key = str(good.parent.relative_to(study.folder))
    assert study.results[key] == uninterrupted.results[key]
    error = json.loads(deadly.read_text())["error"]
    assert "SIGKILL" in error
    assert f".logs/{deadly.parent.name}.txt" in error
    assert study.log(deadly.parent.name).count("Seed set") == ATTEMPTS
    failure = json.loads(wrong.read_text())
    assert failure["error"] == "RuntimeError: this attention does not work"
    assert "own.py" in failure["traceback"]
    assert study.log(wrong.parent.name).count("Seed set") == 1
    assert "/loss is nan" in json.loads(diverged.read_text())["diverged"]
    assert not any(name.startswith("test/") for name in json.loads(diverged.read_text()))
    for line in (
        "failed   sort Deadly",
        "failed   sort Wrong",
        "finished sort kv",
        "diverged reverse kv",
        "error: 2 runs failed",
    ):
        assert printed.count(line) == 1, line

    before = study.finished
    printed = study.run(code=1)  # leaves them as they are
    assert "4 runs: 1 finished, 1 diverged, 2 failed" in printed
    assert printed.count("failed before, ") == 2
    assert study.log(deadly.parent.name).count("Seed set") == ATTEMPTS

    own = study.root / "own.py"
    own.write_text(OWN.replace("os.kill(os.getpid(), signal.SIGKILL)", "return super().forward(*args, **kwargs)"))
    printed = study.run("--retry_failed", code=1)
    assert "finished sort Deadly" in printed
    assert "failed   sort Wrong" in printed
    assert not deadly.exists()
    assert {run: study.finished[run] for run in before} == before


def test_two_studies_in_one_folder_share_the_work(study, uninterrupted):
    study.write_grid(attn=["qkv", "kv"])
    drivers = [study.start(), study.start()]
    assert [driver.join() for driver in drivers] == [0, 0], [driver.printed for driver in drivers]
    assert len(study.results) == 4
    assert all(uninterrupted.results[run] == found for run, found in study.results.items())
    for run in study.finished:
        assert study.log(run).count("Seed set") == study.log(run).count("tokens_per_second") == 1


def test_broken_files_are_made_anew(study, uninterrupted):
    study.run()
    before = study.finished
    last, begun, truncated, empty, other, left = sorted(study.folder.glob("*/*/*/result.json"))
    truncated.write_text(truncated.read_text()[:200])
    empty.write_text("")
    other.write_text('{"test/acc": 1}')
    for result in (last, begun):  # as if it had been killed, the one while its last checkpoint was written
        result.unlink()
        best = (result.parent / "checkpoints" / "best.ckpt").read_bytes()
        (result.parent / "checkpoints" / "last.ckpt").write_bytes(best[: len(best) // 2] if result == last else best)
    printed = study.run()
    assert "6 runs: 5 begun, 1 finished" in printed or "6 runs: 1 finished, 5 begun" in printed
    assert study.results == uninterrupted.results
    assert {run: bytes for run, bytes in study.finished.items() if before[run] == bytes}.keys() == {left.parent.name}
    assert "Restored all states" in study.log(begun.parent.name)
    assert "Restored all states" not in study.log(last.parent.name)


@pytest.fixture
def small_disk(tmp_path):
    """A disk that holds about half a study, as root can make one; called with a size, it gets that."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk")
    yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_stops_the_study_in_one_line(study, small_disk, uninterrupted):
    study.folder = study.root / "disk" / "runs"
    printed = study.run(code=2)
    (error,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert str(study.folder) in error
    assert "make room" in error
    for result in study.folder.rglob("result.json"):
        assert json.loads(result.read_text())["config"]
    assert not [*study.folder.rglob("failure.json")]
    small_disk("100m")
    study.run()
    assert study.results == uninterrupted.results
