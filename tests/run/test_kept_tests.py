"""What `kvt test` measures is kept in the result of a run that was not tested, if it is the run's own."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import kvt as package
from kvt.run.cli import KvtCLI
from tests.helpers.runs import contents

SIZES = {"train_size": 96, "val_size": 64, "test_size": 64, "batch_size": 16, "dim": 16, "max_epochs": 2}


def spoil_last(run: Path) -> None:
    """Give last.ckpt other weights, and the metrics that they might have."""
    last = run / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    content["state_dict"] = {name: -weight for name, weight in content["state_dict"].items()}
    content["metrics"] = {"val/acc": 0.03125}
    torch.save(content, last)


@pytest.fixture
def run(in_tmp_dir) -> Path:
    """A run that was not tested, and whose last checkpoint has other weights than its best."""
    config = package.RunConfig.from_name("reverse").changed(**SIZES, enable_progress_bar=False)
    folder = package.train(config.changed(accelerator="cpu"), test=False).folder
    spoil_last(folder)
    return folder


def measure(run: Path, kvt, name: str, *words: str) -> dict[str, float]:
    kvt("test", "--ckpt_path", str(run / "checkpoints" / f"{name}.ckpt"), *words)
    return json.loads((run / "result.json").read_text())


def test_the_best_checkpoint_on_its_own_test_split_runs_result(run, kvt, capsys):
    before = json.loads((run / "result.json").read_text())
    after = measure(run, kvt, "best")
    assert f"metrics in {run.relative_to(Path.cwd())}/result.json" in capsys.readouterr().out
    assert {name: after[name] for name in before} == before
    assert {name for name in after if name not in before} == {"test/acc", "test/loss"}


def test_it_equals_that_of_a_run_that_tests_itself(run, kvt):
    whole = package.train(package.RunConfig.from_run(run))
    assert measure(run, kvt, "best")["test/acc"] == pytest.approx(whole.metrics["test/acc"])


def test_other_weights_limits_and_a_dry_run_leave_nothing(run, kvt, in_tmp_dir):
    shutil.copy(run / "checkpoints" / "best.ckpt", "mine.ckpt")
    before = contents(in_tmp_dir)
    kvt("test", "--ckpt_path", "mine.ckpt")
    measure(run, kvt, "last")
    measure(run, kvt, "best", "--limit_test_batches", "1")
    measure(run, kvt, "best", "--fast_dev_run", "true")
    assert contents(in_tmp_dir) == before


@pytest.mark.parametrize("named", [[], ["--config", "limited/config.yaml"]], ids=["checkpoint", "config"])
@pytest.mark.parametrize("limits", [{"limit_val_batches": 1, "limit_test_batches": 1}, {"overfit_batches": 1}])
def test_the_limits_of_a_run_do_not_limit_what_is_measured_later(in_tmp_dir, kvt, capsys, limits, named):
    config = package.RunConfig.from_name("reverse").changed(**SIZES, accelerator="cpu", enable_progress_bar=False)
    run = package.train(config.changed(**limits), "limited").folder
    before = json.loads((run / "result.json").read_text())
    (run / "result.json").unlink()
    task, data = package.load(run), KvtCLI(config.as_dict()).datamodule
    data.setup("fit")
    for command, split in (("validate", "val"), ("test", "test")):
        kvt(command, "--ckpt_path", str(run / "checkpoints" / "best.ckpt"), *named)
        whole = (task.predict(data.splits[split][0]) == data.splits[split][1]).float().mean()
        assert f"{float(whole):.4f}" in capsys.readouterr().out
    (run / "result.json").write_text(json.dumps(before))
    after = measure(run, kvt, "best", *named)
    assert after["notes"] == before["notes"]
    if "limit_test_batches" in limits:  # the run's own metric of a part keeps its note
        assert after == before


def test_the_limit_of_a_run_without_a_test_is_no_note(in_tmp_dir, kvt):
    config = package.RunConfig.from_name("reverse").changed(**SIZES, accelerator="cpu", enable_progress_bar=False)
    run = package.train(config.changed(limit_test_batches=1), test=False).folder
    assert not json.loads((run / "result.json").read_text())["notes"]
    assert "test/acc" in measure(run, kvt, "best")
