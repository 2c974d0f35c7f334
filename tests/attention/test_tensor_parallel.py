"""Two processes with half of the heads each compute what one process does, or refuse in one line."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kvt.attention import ATTENTION, AttentionFactory
from kvt.system.errors import UserError

pytestmark = pytest.mark.slow

HEADS, DIM, LENGTH = 4, 16, 5
SHARED = {"mla": "k", "q-kv-deepseek": "k"}
"""The projection of a single head, which both processes have."""
WORKS = {
    **{name: (name, {}, SHARED.get(name, "")) for name in ATTENTION if name != "x-kv"},
    "qkv, grouped": ("qkv", {"kv_heads": 2}, ""),
    "kv, grouped": ("kv", {"kv_heads": 2, "rope": 1.0}, ""),
    "qkv, one key": ("qkv", {"kv_heads": 1}, "kv"),
    "qkv, no self": ("qkv", {"attend_self": False}, ""),
    "kv+pos, each head": ("kv+pos", {"per_head": True}, ""),
    "mla, rope": ("mla", {"rope": 0.5}, "k"),
}
REFUSED = {
    "x-kv": ("x-kv", {}, "", "the query of 4 heads cannot be used with 2"),
    "kv+phase": ("kv+phase", {"phase": "learned"}, "", "the phase of 4 heads"),
    "kv+pos": ("kv+pos", {"per_head": True}, "to_logit", "gain and bias of 4 heads"),
    "q-kv-deepseek": ("q-kv-deepseek", {}, "", "projection.k has 2 channels, not a multiple of 4"),
}


def layer(attn: str, settings: dict) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    made = AttentionFactory(attn, settings, heads=HEADS, max_len=LENGTH)(DIM)
    return made, torch.randn(2, LENGTH, DIM, requires_grad=True)


def outcome(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output = module(x, causal=True)
    return output.detach(), *torch.autograd.grad(output.square().sum(), x)


def work(rank: int, folder) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo", f"file://{folder / 'meet'}", rank=rank, world_size=2)
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for group, cases in (("works", WORKS), ("refused", REFUSED)):
        for name, (attn, settings, whole, *_) in cases.items():
            module, x = layer(attn, settings)
            plan = {f"projection.{part}": ColwiseParallel() for part in module.projection if part not in whole}
            plan["output"] = RowwiseParallel()
            if settings.get("per_head") and not whole:
                plan["to_logit"] = ColwiseParallel()
            parallelize_module(module, mesh, plan)
            try:
                found[group, name] = [t * 1 for t in outcome(module, x)]  # waits for the other process
            except UserError as error:
                found[group, name] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", WORKS)
def test_sharded_heads_compute_what_whole_ones_do(found, name):
    attn, settings, whole = WORKS[name]
    output, gradient = outcome(*layer(attn, settings))
    for of_rank in found:
        assert_close(of_rank["works", name][0], output)
        if not whole:  # a projection that both have gets the gradient of one process's heads
            assert_close(of_rank["works", name][1], gradient)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(found, name):
    for of_rank in found:
        assert REFUSED[name][-1] in of_rank["refused", name]
