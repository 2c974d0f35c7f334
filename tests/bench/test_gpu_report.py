"""The benchmarks of whole training steps run, and name a missing GPU."""

import gpu
import overhead
import pytest
import torch

from kvt.attention import ATTENTION


@pytest.mark.slow
def test_every_task_and_every_attention_is_in_the_report(tmp_path, capsys):
    flags = ["--device", "cpu", "--compiled", "no", "--attn", "kv+pos", "--repeats", "1"]
    gpu.main([*flags, "--out", str(tmp_path / "gpu.md")])
    report = (tmp_path / "gpu.md").read_text()
    assert report in capsys.readouterr().out
    assert "small sizes" in report
    _, _, steps, kernels = report.strip().split("\n\n")
    assert len(steps.splitlines()) == 2 + len(gpu.CASES) * 2
    assert len({line.count("|") for line in steps.splitlines()}) == 1
    assert {line.split(" | ")[0].removeprefix("| ") for line in kernels.splitlines()[2:]} == {*ATTENTION}
    assert "nan" not in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="needs a GPU: --device cpu"):
        gpu.main(["--out", str(tmp_path / "gpu.md")])
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_overhead_has_its_two_tables(capsys):
    overhead.main(["--steps", "60", "--dim", "8", "--batch_size", "4"])
    whole, parts = capsys.readouterr().out.strip().split("\n\n")
    bare, ours = (float(line.split(" | ")[1]) for line in whole.splitlines()[2:4])
    assert min(bare, ours) > 0
    assert "[Callback]Throughput" in parts
    assert "training_step" not in parts
