import pytest
import torch
from torch import nn

from kvt.system import hardware
from kvt.system.errors import UserError
from kvt.system.hardware import FLOAT32_ERROR, MetaParameters, environment, fast_matmul


@pytest.fixture
def untried():
    """No matmul precision has been chosen yet."""
    fast_matmul.cache_clear()
    yield
    fast_matmul.cache_clear()


def test_products_of_half_precision_do_not_pass():
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    half = (a.bfloat16() @ b.bfloat16()).double()
    assert (half - exact).norm() / exact.norm() > 100 * FLOAT32_ERROR
    tf32 = (a.view(torch.int32) & ~0x1FFF).view(torch.float32).double() @ b.double()
    assert (tf32 - exact).norm() / exact.norm() > 10 * FLOAT32_ERROR


def test_the_setting_chosen_is_accurate_to_float32():
    hardware.tune()  # conftest restores the precision
    for n, m, k in ((65, 65, 64), (512, 256, 256), (33, 1000, 77)):
        a, b = torch.randn(n, k), torch.randn(k, m)
        exact = a.double() @ b.double()
        assert ((a @ b).double() - exact).norm() / exact.norm() < FLOAT32_ERROR
    assert environment()["machine"]["float32_matmul"] == torch.get_float32_matmul_precision() == fast_matmul()


@pytest.mark.usefixtures("untried")
def test_an_inaccurate_product_leaves_the_default(monkeypatch):
    monkeypatch.setattr(hardware, "FLOAT32_ERROR", 0.0)
    assert fast_matmul() == "highest"


@pytest.mark.usefixtures("untried")
def test_the_trial_changes_no_setting_and_no_random_number():
    torch.manual_seed(0)
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    fast_matmul()
    assert torch.get_float32_matmul_precision() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_available_memory_is_granted_and_more_is_refused_by_name(monkeypatch):
    assert hardware.free_memory() > 2**24
    monkeypatch.setattr(hardware, "free_memory", lambda: 2**30)
    hardware.require_memory(2**30, "--depth 9")
    with pytest.raises(UserError, match=r"^--depth 9 needs 2,048 MiB of memory, there are 1,024: choose less$"):
        hardware.require_memory(2**31, "--depth 9")


def test_a_footprint_is_that_of_the_numbers_and_little_more():
    assert 4 * 1000 * 1001 < hardware.footprint(nn.Linear(1000, 1000)) < 4.1 * 1000 * 1001


def test_meta_parameters_take_no_memory_and_other_tensors_have_values():
    with MetaParameters():
        layer, rates = nn.Linear(10**7, 10**7), torch.linspace(0, 1, 3)
    assert layer.weight.is_meta
    assert rates.tolist() == [0, 0.5, 1]
