import pytest

from kvt.bench import measure


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 1e-5)
