import pytest

from kvt.attention import kernels


@pytest.fixture(scope="module", params=["fused", "small maps"])
def kernel(request):
    """Run a test twice: with the fused kernels only, and with explicit maps where they are small."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "fused":
            patch.setattr(kernels, "SMALL_MAP", dict.fromkeys(kernels.SMALL_MAP, 0))
        yield
