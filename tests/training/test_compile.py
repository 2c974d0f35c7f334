"""A model that torch compiles is the same model."""

import shutil

import pytest
import torch

from tests.conftest import SMALL_LISTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
]
FLAGS = [*SMALL_LISTS, "--length", "6", "--depth", "1", "--heads", "2", "--dropout", "0", "--max_epochs", "2"]


def test_compiled_or_not_the_result_is_the_same(experiment):
    torch.compiler.reset()
    plain, compiled = experiment("reverse", *FLAGS), experiment("reverse", *FLAGS, "--compile", "true")
    assert (plain["config"]["compile"], compiled["config"]["compile"]) == (False, True)
    for name in ("val/loss", "test/loss"):
        assert compiled[name] == pytest.approx(plain[name], rel=1e-3)
    names = [
        torch.load(run["path"].parent / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"].keys()
        for run in (plain, compiled)
    ]
    assert names[0] == names[1]
