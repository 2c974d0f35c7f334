import torch

from kvt.system import hardware
from kvt.system.environment import environment
from kvt.system.hardware import FLOAT32_ERROR, fast_matmul, keep_memory, tune


def test_products_of_half_precision_do_not_pass():
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    half = (a.bfloat16() @ b.bfloat16()).double()
    assert (half - exact).norm() / exact.norm() > 100 * FLOAT32_ERROR
    tf32 = (a.view(torch.int32) & ~0x1FFF).view(torch.float32).double() @ b.double()
    assert (tf32 - exact).norm() / exact.norm() > 10 * FLOAT32_ERROR


def test_the_setting_chosen_is_accurate_to_float32():
    before = torch.get_float32_matmul_precision()
    try:
        tune()
        assert torch.get_float32_matmul_precision() == fast_matmul()
        for n, m, k in ((65, 65, 64), (512, 256, 256), (33, 1000, 77)):
            a, b = torch.randn(n, k), torch.randn(k, m)
            exact = a.double() @ b.double()
            assert ((a @ b).double() - exact).norm() / exact.norm() < FLOAT32_ERROR
        assert environment()["machine"]["float32_matmul"] == fast_matmul()
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_inaccurate_product_leaves_the_default(monkeypatch):
    monkeypatch.setattr(hardware, "_matmul_error", lambda: 1e-3)
    fast_matmul.cache_clear()
    try:
        assert fast_matmul() == "highest"
    finally:
        fast_matmul.cache_clear()


def test_the_trial_changes_no_setting_and_no_random_number():
    torch.manual_seed(0)
    before, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    fast_matmul.cache_clear()
    fast_matmul()
    assert torch.get_float32_matmul_precision() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_can_be_kept_again_and_again():
    assert keep_memory() == keep_memory()
