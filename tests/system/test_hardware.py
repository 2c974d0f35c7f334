import subprocess

import lightning  # noqa: F401 - sets how torch counts GPUs
import pytest
import torch
from torch import nn

from kvt import tune as hardware
from kvt.tune import FLOAT32_ERROR, MetaParameters, environment


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


def test_meta_parameters_take_no_memory_and_other_tensors_have_values():
    with MetaParameters():
        layer, rates = nn.Linear(10**7, 10**7), torch.linspace(0, 1, 3)
    assert layer.weight.is_meta
    assert rates.tolist() == [0, 0.5, 1]


def test_cudnn_computes_no_attention():
    torch.backends.cuda.enable_cudnn_sdp(True)
    hardware.tune()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_WORK_TREE"])
def test_the_commit_is_that_of_kvts_clone_in_a_hook_of_another_repository(monkeypatch, tmp_path, name):
    own = environment()["commit"]
    if own is None:
        pytest.skip("kvt is not run from a clone")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setenv(name, str(tmp_path / {"GIT_DIR": ".git"}.get(name, ".")))
    assert environment()["commit"] == own
