"""Flags that ask for more than fits into memory: one line that names them, and no process that Linux must kill."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import CONFIGS, QUIET, SMALL, SMALL_LISTS
from tests.helpers.sandbox import command, forked

pytestmark = pytest.mark.slow

BENCH = ["bench", "--attn", "kv", "--n", "8", "--heads", "2", "--repeats", "1"]
HUGE = str(10**12)


@pytest.fixture(scope="module")
def trained(small_data, tmp_path_factory) -> dict[str, str]:
    """A checkpoint of each task."""
    root = tmp_path_factory.mktemp("trained")
    paths = {}
    for task in ("characters", "translation"):
        words = ["--config", str(CONFIGS / f"{task}.yaml"), *QUIET, *SMALL[task], "--data_dir", str(small_data)]
        assert command("fit", *words, "--default_root_dir", str(root / task)).code == 0
        (best,) = (root / task).rglob("best.ckpt")
        paths[task] = str(best)
    return paths


@pytest.mark.parametrize("tokens", [10**12, 10**18])
def test_a_text_without_end_is_written_until_nobody_reads_on(in_tmp_dir, trained, tokens):
    words = ["generate", "--ckpt_path", trained["characters"], "--tokens", str(tokens), "--window", "restart"]
    start = [sys.executable, "-c", "from kvt.cli.main import main; main()", *words]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert len(process.stdout.read(300)) == 300
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""


def test_a_beam_whose_caches_do_not_fit(in_tmp_dir, trained, monkeypatch):
    """Its logits alone would."""
    monkeypatch.setattr("kvt.system.hardware.free_memory", lambda: 2**30)
    words = ["translate", "Hund", "--ckpt_path", trained["translation"], "--beam", "1000000"]
    command(*words).refused("beam=1000000 needs", "MiB of memory")


@pytest.mark.parametrize("beam", [10**9, 10**18])
def test_a_beam(in_tmp_dir, trained, beam):
    words = ["translate", "Hund", "--ckpt_path", trained["translation"], "--beam", str(beam)]
    command(*words).refused(f"beam={beam} needs", "MiB of memory")


@pytest.mark.parametrize("size", [["--d", "8", "1000000"], ["--d", "8", "--batch", HUGE]], ids=str)
def test_a_measurement(in_tmp_dir, size):
    """One that fits is made, others say in their row that they do not."""
    forked(_measured, size)


def _measured(size) -> None:
    assert command(*BENCH, *size).code == 0
    rows = Path("bench.csv").read_text().splitlines()[1:]
    assert "out of memory" in rows[-1]
    assert ("out of memory" not in rows[0]) == ("1000000" in size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA reserves addresses for all the memory there may be")
@pytest.mark.parametrize("name", ["fit", "generate", "translate", "maps", "bench"])
def test_every_command_that_computes_limits_itself(in_tmp_dir, trained, name):
    """What one asks for beyond the machine's memory then fails, where Linux would kill some process."""
    words = {
        "fit": ["--config", str(CONFIGS / "reverse.yaml"), *QUIET, *SMALL_LISTS, "--max_epochs", "1"],
        "generate": ["--ckpt_path", trained["characters"], "--tokens", "1"],
        "translate": ["Hund", "--ckpt_path", trained["translation"]],
        "maps": ["--ckpt_path", trained["characters"]],
        "bench": ["--attn", "kv", "--n", "8", "--d", "8", "--heads", "2", "--repeats", "1"],
    }
    forked(_limited, name, words[name])


def _limited(name, words) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # what other tests have left
    assert command(name, *words).code == 0
    assert 0 < resource.getrlimit(resource.RLIMIT_DATA)[0] < 2 * machine  # with what it may swap
