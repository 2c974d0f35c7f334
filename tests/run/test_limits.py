"""A machine that gives little, flags that ask for what it does not have: one line, or a correct run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from shlex import quote

import pytest
import torch

from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL_LISTS, slow
from tests.helpers.drivers import Study
from tests.helpers.sandbox import Ended, command, disk, read_only, sandboxed

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *QUIET[:2], *SMALL_LISTS, "--max_epochs", "2"]
FIRST = Path("lightning_logs/reverse/kv/version_0")
MISSING = ["--accelerator=xyz", "--devices=[7]", "--devices=0"]
MISSING += ["--strategy=deepspeed", "--strategy=ddp_spawn", "--precision=transformer-engine"]
if not torch.cuda.is_available():
    MISSING += ["--accelerator=gpu", "--accelerator=mps"]


@pytest.mark.parametrize("flag", MISSING)
def test_flags_that_ask_for_what_is_not_there(in_tmp_dir, flag):
    line = command(*RUN, *([] if "accelerator" in flag else QUIET[2:]), flag).refused()
    assert any(word in line.replace("_", "-") for word in flag.replace("_", "-").strip("-").split("=")), line
    assert not Path("lightning_logs").exists()


def test_checkpoints_that_are_missing_from_a_run_to_resume(in_tmp_dir):
    assert command(*RUN, *QUIET[2:]).code == 0
    resume = ["fit", "--resume", str(FIRST), *QUIET[:2]]
    assert "already finished" in command(*resume).out
    command(*resume, "--lr", "0.5").refused("a resumed run keeps its settings: drop --lr")
    (FIRST / "result.json").unlink()
    best, last = (FIRST / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    best.rename("kept.ckpt")
    command(*resume).refused("best.ckpt", "is missing")
    Path("kept.ckpt").rename(best)
    last.rename("kept.ckpt")
    last.mkdir()
    command(*resume).refused("last.ckpt")
    last.rmdir()
    Path("kept.ckpt").rename(last)
    assert command(*resume).code == 0


def printing(text: str) -> list[str]:
    return [sys.executable, "-c", f"from kvt.system.console import run; run(lambda: print({text}))"]


def test_a_terminal_that_has_few_letters():
    few = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = printing("'M' + chr(228) + 'dchen'")
    assert subprocess.run(words, env=few, capture_output=True, text=True, check=True).stdout == "M\\xe4dchen\n"


def test_nowhere_to_print(in_tmp_dir):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(printing("1"), stdout=full, stderr=subprocess.PIPE, text=True)
    Ended(ended.returncode, "", ended.stderr).refused("No space left on device")


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", *slow("2>&-")])
def test_closed_streams(in_tmp_dir, closed):
    """As a daemon has them: nothing is printed, and all files are whole."""
    script = quote(str(REPOSITORY / "experiments" / "synthetic.py"))
    words = " ".join([quote(sys.executable), script, "--accelerator cpu --max_epochs 2", *SMALL_LISTS])
    ended = subprocess.run(f"{words} {closed}", shell=True, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert "test/acc" in json.loads((FIRST / "result.json").read_text())
    assert len((FIRST / "history.csv").read_text().splitlines()) == 3
    for path in FIRST.rglob("*"):
        assert path.is_dir() or b"parameters\n" not in path.read_bytes()


def test_without_a_terminal_there_is_a_line_an_epoch(in_tmp_dir):
    ended = command(*[word for word in RUN if word not in QUIET], "--accelerator", "cpu")
    epochs = [line for line in ended.out.splitlines() if line.startswith("epoch ")]
    assert len(epochs) == 2, ended.out
    assert all(f"epoch {epoch}, step {(epoch + 1) * 6}: " in line for epoch, line in enumerate(epochs))
    assert all("val/acc 0." in line and "loss" in line for line in epochs)
    assert "it/s" not in ended.out + ended.err


def test_the_validation_that_ends_a_run_has_one_line(in_tmp_dir):
    words = [word for word in RUN if word not in QUIET]
    ended = command(*words, "--accelerator", "cpu", "--max_steps", "4", "--val_check_interval", "2")
    assert re.findall(r"^epoch 0, step (\d)", ended.out, re.MULTILINE) == ["2", "4"]


@pytest.mark.slow
def test_a_study_and_two_processes_on_one_core_without_shared_memory(in_tmp_dir):
    sandboxed(_study_and_two_processes)


def _study_and_two_processes() -> None:
    disk(Path("/dev/shm"))
    read_only(Path("/dev/shm"))
    with pytest.raises(OSError, match="Read-only"):
        Path("/dev/shm/something").touch()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    study = Study(Path("study").resolve(), attn=["qkv", "kv"], max_epochs=1, train_size=96, tasks=["sort"])
    two = [str(REPOSITORY / "experiments" / "synthetic.py"), *QUIET, *SMALL_LISTS, "--max_epochs=1"]
    for folder, words in (
        (study.root, ["-c", "from kvt.cli.main import main; main()", *study.words(), "--workers", "2"]),
        (Path.cwd(), [*two, "--devices=2", "--strategy=ddp"]),
    ):
        ended = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
    assert len(study.finished) == 2
    (path,) = Path("lightning_logs").rglob("result.json")
    assert "test/acc" in json.loads(path.read_text())
