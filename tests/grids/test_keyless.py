"""A routing matrix adds nothing to what queries can be."""

import pytest
import torch

from kvt.attention.variants import QSharedKV
from kvt.grids.keyless import Routed


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_queries_that_are_mapped_before_are_the_same_attention(heads, causal):
    torch.manual_seed(heads)
    routed = Routed(16, heads, std=0.5).double()
    plain = QSharedKV(16, heads).double()
    plain.load_state_dict(routed.state_dict(), strict=False)
    with torch.no_grad():  # a row of q is x Wᵀ + b; of each head R maps it
        q, routing = plain.projection["q"], routed.routing.mT
        q.weight.copy_((routing @ q.weight.unflatten(0, (heads, -1))).flatten(0, 1))
        q.bias.copy_((routing @ q.bias.unflatten(0, (heads, -1)).unsqueeze(-1)).flatten())
    x = torch.randn(2, 7, 16, dtype=torch.double)
    torch.testing.assert_close(routed(x, causal=causal), plain(x, causal=causal), rtol=0, atol=1e-12)
