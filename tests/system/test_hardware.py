import subprocess
import sys

import torch
from torch import nn

from kvt.system import hardware
from kvt.system.hardware import FLOAT32_ERROR, MetaParameters, environment


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
    assert environment()["machine"]["float32_matmul"] == torch.get_float32_matmul_precision()
    assert hardware.fast_products == (torch.get_float32_matmul_precision() == "medium")


def test_an_inaccurate_product_leaves_the_default(monkeypatch):
    monkeypatch.setattr(hardware, "FLOAT32_ERROR", 0)
    hardware.tune()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not hardware.fast_products


def test_the_trial_draws_no_random_number_of_the_users():
    state = torch.get_rng_state()
    hardware.tune()
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_computes_the_same_under_torchs_newer_setting_which_is_recorded():
    code = """if True:
        import torch
        from kvt.attention import make_attention
        from kvt.system.hardware import environment, tune

        torch.backends.fp32_precision = "tf32"
        assert environment()["machine"]["float32_matmul"] == "tf32"
        layer = make_attention("kv+pos", dim=8, heads=2, max_len=128).double()
        x = torch.randn(2, 128, 8, dtype=torch.float64)
        before = layer(x)  # through the fused kernel, which `tune` leaves to longer sequences
        tune()
        torch.testing.assert_close(layer(x), before)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_meta_parameters_take_no_memory_and_other_tensors_have_values():
    with MetaParameters():
        layer, rates = nn.Linear(10**7, 10**7), torch.linspace(0, 1, 3)
    assert layer.weight.is_meta
    assert rates.tolist() == [0, 0.5, 1]
