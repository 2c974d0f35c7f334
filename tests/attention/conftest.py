import pytest

from kvt.attention import kernels


@pytest.fixture(autouse=True, scope="module", params=["fused", "small maps"])
def kernel(request):
    """Every property holds through the fused kernel, and where small maps are made."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fused":
            patch.setattr(kernels, "SMALL_MAP", dict.fromkeys(kernels.SMALL_MAP, 0))
        yield
