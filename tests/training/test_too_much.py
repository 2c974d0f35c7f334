"""Flags that ask for more than fits into memory: one line that names them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CONFIGS, QUIET, SMALL
from tests.helpers.sandbox import command

pytestmark = pytest.mark.slow

BENCH = ["bench", "--attn", "kv", "--n", "8", "--heads", "2", "--repeats", "1", "--d", "8"]


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


def test_an_endless_text_ends_with_its_reader(in_tmp_dir, trained):
    words = ["generate", "--ckpt_path", trained["characters"], "--tokens", str(10**18), "--window", "restart"]
    start = [sys.executable, "-c", "from kvt.cli.main import main; main()", *words]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert len(process.stdout.read(300)) == 300
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""


@pytest.mark.parametrize(("beam", "free"), [(10**6, 2**30), (10**9, None), (10**18, None)])
def test_a_beam(in_tmp_dir, trained, monkeypatch, beam, free):
    """Of a million, the logits alone would fit into a GiB, but not the caches."""
    if free:
        monkeypatch.setattr("kvt.system.hardware.free_memory", lambda: free)
    words = ["translate", "Hund", "--ckpt_path", trained["translation"], "--beam", str(beam)]
    command(*words).refused(f"beam={beam} needs", "MiB of memory")


@pytest.mark.parametrize(("size", "fits"), [(["10000000"], True), (["--batch", str(10**12)], False)])
def test_a_measurement_that_does_not_fit_has_a_row_that_tells_it(in_tmp_dir, size, fits):
    assert command(*BENCH, *size).code == 0
    rows = Path("bench.csv").read_text().splitlines()[1:]
    assert "out of memory" in rows[-1]
    assert ("out of memory" not in rows[0]) == fits
