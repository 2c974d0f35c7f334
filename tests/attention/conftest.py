import pytest

from kvt.attention import base


@pytest.fixture(autouse=True, scope="module", params=["fused", "small maps"])
def kernel(request):
    """Every property holds through the fused kernel, and where small maps are made."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fused":
            patch.setattr(base, "SMALL_MAP", dict.fromkeys(base.SMALL_MAP, 0))
        yield
