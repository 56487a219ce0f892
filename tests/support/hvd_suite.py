"""Cases for Horovod's own tests of hvd, each with the name of Horovod's test, run by the ranks of one job.

    @case("test_horovod_allreduce")            # in test_hvd_suite_*.py: a function that asserts on every rank
    def sums(): ...

After each case the ranks make a sum without a name, which fails if they are out of step.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import bpsfast.hvd as hvd
from tests.support.every_shape import SturdyJob
from tests.support.jobs import Job

#: Ranks 0 and 2 are one process set of the cases that use two, rank 1 the other.
SIZE = 3
DIMS = (1, 2, 3)
INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
REDUCED = (*INTEGERS, *FLOATS, torch.float16)
MOVED = (torch.uint8, torch.int8, torch.int16, *REDUCED)

CASES: dict[str, Callable[[], None]] = {}


def case(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the function as the case of Horovod's tests *names*."""
    def enter(function: Callable[[], None]) -> Callable[[], None]:
        for name in names:
            assert name not in CASES, f"{name} is there twice"
            CASES[name] = function
        return function

    return enter


def run_case(name: str) -> None:
    """Run the case on this rank, and check afterwards that it is in step with the others."""
    hvd.init()
    CASES[name]()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert total.item() == hvd.size(), f"out of step: {total.item()} of {hvd.size()} ranks"


@pytest.fixture(scope="module")
def ranks() -> Iterator[SturdyJob]:
    """Yield the job whose ranks run the cases of one file."""
    job = SturdyJob(lambda: Job(ranks=(SIZE,), forked=True, start_timeout_s=120, timeout_s=120), (SIZE,))
    yield job
    job.close()


@contextlib.contextmanager
def own_set() -> Iterator[Any]:
    """Yield this rank's process set: even and odd ranks have one each."""
    sets = [hvd.add_process_set(range(start, hvd.size(), 2)) for start in (0, 1)]
    yield sets[hvd.rank() % 2]
    for each in sets[::-1]:
        assert hvd.remove_process_set(each)


def values(rank: int, shape: Sequence[int], dtype: torch.dtype, salt: int = 0, largest: int = 100) -> torch.Tensor:
    """Return integers of magnitude up to *largest*, different on each rank; none is negative for unsigned *dtype*."""
    generator = torch.Generator().manual_seed(rank + 100 * salt)
    least = 0 if dtype == torch.uint8 else -largest
    return torch.randint(least, largest + 1, tuple(shape), generator=generator).to(dtype)


def stacked(ranks: Sequence[int], shape: Sequence[int], dtype: torch.dtype, salt: int = 0,
            largest: int = 100) -> torch.Tensor:
    """Return the inputs of *ranks* in float64, in which sums of them are exact."""
    return torch.stack([values(rank, shape, dtype, salt, largest) for rank in ranks]).double()


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return *x* in *dtype*, truncated towards zero for integers."""
    return (x if dtype.is_floating_point else x.trunc()).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether both are equal, with a tolerance for floating-point numbers."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    if not found.dtype.is_floating_point:
        return torch.equal(found, wanted)
    digits = 2e-3 if found.dtype == torch.float16 else 1e-5
    return torch.allclose(found.double(), wanted.double(), rtol=digits, atol=digits)


def refused(errors: Any, function: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """Return the message of the exception of *function*, which must be one of *errors*."""
    with pytest.raises(errors) as caught:
        function(*arguments, **keywords)
    return str(caught.value)
