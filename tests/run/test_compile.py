"""A model that torch compiles is the same model."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from tests.conftest import SMALL


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["reverse", "mqar", "language_model"])
def test_compiled_or_not_the_result_is_the_same(experiment, name):
    torch.compiler.reset()
    counters["stats"].clear()
    flags = [*SMALL[name], "--depth", "1", "--heads", "2", "--dropout", "0"]
    plain = experiment(name, *flags)
    assert not counters["stats"]["unique_graphs"]
    compiled = experiment(name, *flags, "--compile", "true")
    assert counters["stats"]["unique_graphs"]
    assert (plain["config"]["compile"], compiled["config"]["compile"]) == (False, True)
    for score in {"val/loss", "test/loss"} & plain.keys():
        assert compiled[score] == pytest.approx(plain[score], rel=1e-3)
    names = [
        torch.load(run["path"].parent / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"].keys()
        for run in (plain, compiled)
    ]
    assert names[0] == names[1]
