"""The benchmarks of whole training steps run, and name a missing GPU."""

import gpu
import overhead
import pytest
import torch

from kvt.attention import ATTENTION


@pytest.mark.slow
def test_every_task_and_every_attention_is_in_the_report(capsys):
    gpu.main(["--device", "cpu", "--compiled", "no", "--attn", "kv+pos", "--repeats", "1", "--allocator", "default"])
    report = capsys.readouterr().out
    _, _, steps, kernels = report.strip().split("\n\n")
    assert len(steps.splitlines()) == 2 + len(gpu.CASES) * 2
    assert len({line.count("|") for line in steps.splitlines()}) == 1
    assert {line.split(" | ")[0].removeprefix("| ") for line in kernels.splitlines()[2:]} == {*ATTENTION}
    assert "nan" not in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert "needs a GPU: choose --device cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_the_overhead_of_a_step_is_printed(capsys):
    overhead.main(["--steps", "60", "--dim", "8", "--batch_size", "4"])
    *_, bare, ours, _, _ = capsys.readouterr().out.splitlines()
    assert all(float(line.split(" | ")[1].split(" ")[0]) > 0 for line in (bare, ours))
