"""A machine that gives little, flags that ask for what it has not: a line, or a correct run."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvt.training.callbacks import FinalValidation
from tests.conftest import CONFIGS, QUIET, REPOSITORY, SMALL, SMALL_LISTS
from tests.helpers.sandbox import Ended, command, forked, read_only, sandboxed

RUN = ["fit", "--config", str(CONFIGS / "reverse.yaml"), *SMALL_LISTS, "--max_epochs", "2"]
FIRST = Path("lightning_logs/reverse/kv/version_0")
REFUSED = {
    "tpu": (["--accelerator", "tpu"], "torch_xla"),
    "hpu": (["--accelerator", "hpu"], "'hpu'"),
    "no such accelerator": (["--accelerator", "xyz"], "'xyz'"),
    "the eighth processor": (["--accelerator", "cpu", "--devices", "[7]"], "devices"),
    "a device by name": (["--accelerator", "cpu", "--devices", "cuda:9"], "devices"),
    "no device": (["--accelerator", "cpu", "--devices", "0"], "devices"),
    "deepspeed": (["--accelerator", "cpu", "--strategy", "deepspeed"], "deepspeed"),
    "shards on a processor": (["--accelerator", "cpu", "--strategy", "fsdp"], "fsdp"),
    "no such strategy": (["--accelerator", "cpu", "--strategy", "xyz"], "'xyz'"),
    "xla": (["--accelerator", "cpu", "--strategy", "xla"], "torch_xla"),
    "transformer engine": (["--accelerator", "cpu", "--precision", "transformer-engine"], "transformer_engine"),
    "processes that hand back nothing": (["--accelerator", "cpu", "--strategy", "ddp_spawn"], "choose ddp"),
}
REFUSED |= {
    f"--devices {count}": (["--accelerator", "cpu", "--devices", str(count)], f"--devices {count}")
    for count in (10**9, 10**21)
}
REFUSED |= {
    f"--num_nodes {count}": (["--accelerator", "cpu", "--num_nodes", str(count)], f"--num_nodes {count}")
    for count in (2, 10**9)
}
if not torch.cuda.is_available():
    REFUSED |= {name: (["--accelerator", name], name) for name in ("gpu", "cuda", "mps")}


@pytest.mark.parametrize("asked", REFUSED)
def test_flags_that_ask_for_what_is_not_there(in_tmp_dir, asked):
    flags, named = REFUSED[asked]
    line = command(*RUN, *QUIET[:2], *flags).refused()
    assert named in line.lower()
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("visible", ["99", "rubbish", ""])
def test_gpus_that_are_not_there(in_tmp_dir, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    forked(_runs)


def _runs() -> None:
    ended = command(*RUN, *QUIET[:2])
    assert (ended.code, ended.err) == (0, "")


def test_data_that_cannot_be_decoded_where_they_are(in_tmp_dir, small_data):
    sandboxed(_closed_data, small_data)


def _closed_data(data: Path) -> None:
    shutil.copytree(data / "mnist", "data/mnist")
    read_only(Path("data"))
    words = ["fit", "--config", str(CONFIGS / "mnist.yaml"), *QUIET, *SMALL["mnist"], "--data_dir", "data"]
    command(*words).refused("cannot write in data/.cache (Read-only file system)", "--data_dir")


def after_two_epochs(happens: Callable[[], object]) -> None:
    """Something happens, once in this process, at the end of a run's second epoch."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 1:
            del FinalValidation.on_train_epoch_end
            happens()

    FinalValidation.on_train_epoch_end = on_train_epoch_end


def _best_is_gone() -> None:
    after_two_epochs((FIRST / "checkpoints" / "best.ckpt").unlink)
    command(*RUN, *QUIET, "--lr", "1e-30").refused("best.ckpt is gone")
    assert not (FIRST / "result.json").exists()


def test_a_best_checkpoint_that_somebody_removes(in_tmp_dir):
    forked(_best_is_gone)


def test_what_a_run_cannot_go_on_without(in_tmp_dir):
    assert command(*RUN, *QUIET).code == 0
    go_on = ["fit", "--resume", str(FIRST), *QUIET[:2]]
    assert "has finished" in command(*go_on).out
    command(*go_on, "--lr", "0.5").refused("made with lr=", "leave --lr out")
    (FIRST / "result.json").unlink()
    best, last = (FIRST / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    best.rename("kept.ckpt")
    command(*go_on).refused("best.ckpt is gone")
    Path("kept.ckpt").rename(best)
    last.rename("kept.ckpt")
    last.mkdir()
    command(*go_on).refused("last.ckpt")
    last.rmdir()
    Path("kept.ckpt").rename(last)
    assert command(*go_on).code == 0


@pytest.mark.parametrize("more", [0, 1])
def test_few_files(in_tmp_dir, more):
    forked(_few_files, more)


def _few_files(more: int) -> None:
    """A process may open so many more than it has open: a run needs a lock, its events, and what it writes."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(more + 1)]
    for number in opened:
        os.close(number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[-1], hard))
    command(*RUN, *QUIET).refused("Too many open files", "ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert command(*RUN, *QUIET).code == 0


def test_files_that_may_not_be_large(in_tmp_dir):
    forked(_small_files)


def _small_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, hard))
    line = command(*RUN, *QUIET).refused("best.ckpt: File too large", "ulimit -f", f"--resume {FIRST} goes on")
    assert not [*FIRST.glob("checkpoints/*")], line
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert command("fit", "--resume", str(FIRST), *QUIET[:2]).code == 0


@pytest.mark.skipif(os.name != "posix", reason="elsewhere a folder in use cannot be removed")
def test_a_working_directory_that_is_gone(in_tmp_dir):
    gone = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} {REPOSITORY}/experiments/synthetic.py"
    ended = subprocess.run(["sh", "-c", gone], capture_output=True, text=True)
    Ended(ended.returncode, ended.stdout, ended.stderr).refused("the working directory is gone")


def test_a_terminal_that_has_few_letters():
    words = [sys.executable, "-c", "from kvt.system.console import run; run(lambda: print('M' + chr(228) + 'dchen'))"]
    few = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert subprocess.run(words, env=few, capture_output=True, text=True, check=True).stdout == "M\\xe4dchen\n"


def test_nowhere_to_print(in_tmp_dir):
    words = [sys.executable, "-c", "from kvt.system.console import run; run(lambda: print(1))"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    Ended(ended.returncode, "", ended.stderr).refused("No space left on device")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
