import os

import pytest
from filelock import FileLock

from tests.helpers.drivers import Study


@pytest.fixture
def study(tmp_path) -> Study:
    return Study(tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Study:
    """The small study if nothing happens to it; made once, however many processes test."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with FileLock(shared / "uninterrupted.lock"):
        study = Study(shared / "uninterrupted")
        study.run()
    return study
