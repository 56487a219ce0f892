"""Jobs whose ranks have called `bpsfast.hvd.init`.

    ranks = of_shapes((1,), (2, 2))     # a fixture, for one rank and for two ranks on each of two nodes

    def test_sum(ranks):
        assert ranks.run(total) == [...]
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import bpsfast.hvd as hvd

if TYPE_CHECKING:  # ranks import this file, too
    from tests.support.jobs import Job


def begin() -> None:
    """Initialize this rank."""
    torch.set_num_threads(1)
    hvd.init()


def begun(job: Job) -> Job:
    """Initialize all ranks of *job*; return it."""
    job.run(begin)
    return job


def of_shapes(*shapes: tuple[int, ...], **values: Any) -> Callable[..., Job]:
    """Return a fixture of jobs over tcp; *shapes* have the ranks of each node, *values* are settings."""

    @pytest.fixture(scope="module", params=shapes, ids=lambda shape: "+".join(map(str, shape)))
    def ranks(request: pytest.FixtureRequest, shared_job: Callable[..., Job]) -> Job:
        return begun(shared_job(ranks=request.param, transport="tcp", **values))

    return ranks
