"""`gpu_job`: two ranks that share the GPU, for all tests of this folder; none is run where there is no GPU."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu import place
from tests.gpu.ranks import start_ranks
from tests.support.every_shape import SturdyJob

_MISSING = place.missing()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs what is not there: from here, so that pytest says so once and not for each test."""
    if _MISSING is not None:
        pytest.skip(_MISSING)
    if place.REHEARSES and item.get_closest_marker("cuda"):
        pytest.skip("needs a GPU itself, not the host device")


@pytest.fixture(scope="session")
def gpu_job() -> Iterator[SturdyJob]:
    """Two ranks; started anew after a test has failed. Tests use names of their own."""
    job = SturdyJob(start_ranks, (2,))
    yield job
    job.close()
