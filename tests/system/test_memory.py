import resource

import pytest
import torch
from torch import nn

from kvt.system import memory
from kvt.system.errors import UserError
from kvt.system.memory import MetaParameters, footprint, free_memory, limit_memory, require_memory
from tests.helpers.sandbox import forked


def test_memory_that_is_there_is_granted_and_more_is_refused_by_name(monkeypatch):
    assert free_memory() > 2**24
    monkeypatch.setattr(memory, "free_memory", lambda: 2**30)
    require_memory(2**30, "--depth 9")
    with pytest.raises(UserError, match=r"^--depth 9 needs 2,048 MiB of memory, there are 1,024: choose less$"):
        require_memory(2**31, "--depth 9")


def test_a_footprint_is_that_of_the_numbers_and_little_more():
    assert 4 * 1000 * 1001 < footprint(nn.Linear(1000, 1000)) < 4.1 * 1000 * 1001


def test_meta_parameters_take_no_memory_and_other_tensors_have_values():
    with MetaParameters():
        layer, rates = nn.Linear(10**7, 10**7), torch.linspace(0, 1, 3)
    assert layer.weight.is_meta
    assert rates.tolist() == [0, 0.5, 1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA reserves addresses for all the memory there may be")
def test_an_allocation_beyond_the_limit_fails(in_tmp_dir):
    forked(_beyond)


def _beyond() -> None:
    memory.free_memory = lambda: 2**28
    limit_memory()
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    torch.ones(2**20)
    with pytest.raises(RuntimeError, match="allocate memory"):
        torch.ones(2**27)
