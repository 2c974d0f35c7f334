import pytest

from kvt import bench


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(bench, "SAMPLE_SECONDS", 1e-5)
