"""Each callback of Lightning and each optimiser of torch: a run has all promises.

The promises: a run that is killed and stopped, and resumed, is a run that was never interrupted, bit for bit. Its
config.yaml makes it again, in a job of a cluster and beside another run's files, too. The numbers of result.json are
those of best.ckpt.
"""

import ast
import inspect
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

from tests.conftest import CONFIGS, QUIET, SMALL_LISTS
from tests.helpers.commands import command, forked
from tests.helpers.runs import read_history, read_result
from tests.run.test_clusters import SLURM
from tests.run.test_killed_runs import require_same, resume, run_folder, start, whole  # noqa: F401 (a fixture)

REVERSE = [
    f"--config={CONFIGS / 'reverse.yaml'}",
    *QUIET,
    *SMALL_LISTS,
    "--max_epochs",
    "4",
    "--log_every_n_steps",
    "1",
]
TRAINED, AVERAGE = "the trained weights", "the average"


class Case(NamedTuple):
    """How to run with a callback or an optimiser, and what the guide says of it."""

    flags: str = ""
    measured: str = TRAINED
    refused: str = ""
    needs: str = "torch"
    """The library without which the case is skipped."""


CALLBACKS = {
    "DeviceStatsMonitor": Case("cpu_stats=true", needs="psutil"),
    "EarlyStopping": Case("monitor=val/loss patience=2"),
    "EMAWeightAveraging": Case("decay=0.9 use_buffers=false", AVERAGE),
    "LearningRateMonitor": Case("logging_interval=step"),
    "ModelCheckpoint": Case("monitor=val/loss dirpath=more every_n_epochs=2"),
    "ModelSummary": Case("max_depth=2"),
    "OnExceptionCheckpoint": Case("dirpath=."),
    "RichModelSummary": Case("max_depth=2", needs="rich"),
    "RichProgressBar": Case("refresh_rate=1", needs="rich"),
    "TQDMProgressBar": Case("refresh_rate=1"),
    "Timer": Case("duration=00:01:00:00"),
    "WeightAveraging": Case("use_buffers=false", AVERAGE),
}
PYTHON = {
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "LambdaCallback",
    "ProgressBar",
    "ThroughputMonitor",
}
"""Classes to derive from, or with arguments that only Python has."""
UNTRUE = {
    *("BackboneFinetuning", "BatchSizeFinder", "GradientAccumulationScheduler", "LearningRateFinder"),
    *("ModelPruning", "SpikeDetection", "StochasticWeightAveraging"),
}
"""Callbacks with which a run trains in another way than its files say, or cannot be resumed; the guide says so."""
OPTIMIZERS = {
    "torch.optim.Adadelta": Case(),
    "torch.optim.Adafactor": Case(),
    "torch.optim.Adagrad": Case(),
    "torch.optim.Adam": Case("amsgrad=true"),
    "torch.optim.AdamW": Case("weight_decay=0.1"),
    "torch.optim.Adamax": Case(),
    "torch.optim.ASGD": Case(),
    "torch.optim.LBFGS": Case("max_iter=2"),
    "torch.optim.Muon": Case(refused="it takes only matrices, and every model has other weights"),
    "torch.optim.NAdam": Case(),
    "torch.optim.RAdam": Case("decoupled_weight_decay=true"),
    "torch.optim.RMSprop": Case("momentum=0.9 centered=true"),
    "torch.optim.Rprop": Case(),
    "torch.optim.SGD": Case("momentum=0.9 nesterov=true"),
    "torch.optim.SparseAdam": Case(refused="it needs sparse gradients, and no model here has any"),
    "pytorch_optimizer.Lion": Case(needs="pytorch_optimizer"),
}


def words_of(name: str) -> list[str]:
    case = CASES[name]
    if name in OPTIMIZERS:
        return [*REVERSE, "--optimizer", name, *(f"--optimizer.{word}" for word in case.flags.split())]
    bar = ["--enable_progress_bar", "true"] if name.endswith("ProgressBar") else []
    return [*REVERSE, *bar, f"--callbacks+={name}", *(f"--callbacks.{word}" for word in case.flags.split())]


CASES = CALLBACKS | OPTIMIZERS
WORKS = [name for name, case in CASES.items() if not case.refused]


def test_each_class_of_lightning_and_of_torch_has_a_case():
    """But for classes to derive from, and for what stands beside callbacks in Lightning's list."""
    theirs = {name for name in callbacks.__all__ if issubclass(getattr(callbacks, name), L.Callback)}
    assert theirs == CALLBACKS.keys() | PYTHON | UNTRUE
    found = [
        cls for cls in vars(torch.optim).values() if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    ]
    assert {f"torch.optim.{cls.__name__}" for cls in found} - {"torch.optim.Optimizer"} <= OPTIMIZERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_a_run_with_it_has_all_promises(name, whole, monkeypatch):  # noqa: F811
    if not find_spec(CASES[name].needs):
        pytest.skip(f"{CASES[name].needs} is not installed")
    words = words_of(name)
    expected, calls = whole(words)
    assert resume(words, f"step:{int(0.7 * calls['step'])}:{SIGKILL:d}") == -SIGKILL
    assert resume(words, f"step:{int(0.1 * calls['step'])}:{SIGTERM:d}") == 128 + SIGTERM
    assert resume(words) == 0
    require_same(run_folder(), expected)
    forked(_measures_what_the_result_says, expected)

    (again := expected.parents[4] / "again").mkdir()
    monkeypatch.chdir(again)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    other = expected.parents[4] / "killed"
    shutil.copy(next(other.rglob("last.ckpt")), "hpc_ckpt_1.ckpt")
    shutil.copy("hpc_ckpt_1.ckpt", "on_exception.ckpt")
    code, _ = start([f"--config={expected / 'config.yaml'}"])
    assert code == 0, Path("printed.txt").read_text()
    assert read_result(run_folder()) == read_result(expected)
    assert read_history(run_folder()) == read_history(expected)


def _measures_what_the_result_says(folder: Path) -> None:
    result = read_result(folder)
    for verb, split in (("validate", "val/"), ("test", "test/")):
        said = command(verb, "--ckpt_path", str(folder / "checkpoints" / "best.ckpt"), *QUIET)
        assert said.code == 0, said
        printed = re.findall(rf"({split}\w+)\s+([\d.e-]+)", said.out.replace("│", " "))
        expected = {name: value for name, value in result.items() if name.startswith(split)}
        assert {name for name, _ in printed} >= expected.keys(), said.out
        for name, value in printed:
            assert ast.literal_eval(value) == pytest.approx(expected[name], rel=1e-6)
