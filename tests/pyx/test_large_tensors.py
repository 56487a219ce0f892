"""Large tensors that are summed again and again get huge pages, and keep their values."""
from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from bpsfast.pyx import direct
from tests.pyx.test_direct import Ranks

NBYTES = 8 << 20
N_SUMS = 8  # BPS_LARGE_FIRST of large_tensors.h
SIZES = "/sys/kernel/mm/transparent_hugepage/enabled"


def huge_nbytes(address: int) -> int:
    """Return how many bytes of the mapping at *address* are in huge pages."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and first.replace("-", "").isalnum() and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_it = begin <= address < end
        elif is_it and first == "AnonHugePages:":
            return int(line.split()[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def memory(nbytes: int) -> np.ndarray:
    """Return private memory of small pages."""
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)


def can_collapse() -> bool:
    """Whether this kernel copies memory to huge pages when it is asked to (MADV_COLLAPSE)."""
    if not os.path.exists(SIZES) or "[never]" in Path(SIZES).read_text():
        return False
    mapped = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.write(bytes(4 << 20))
    try:
        mapped.madvise(25)
    except OSError:
        return False
    return True


class Huge(Ranks):
    def __init__(self, n: int, huge_pages: bool) -> None:
        super().__init__(n, direct.ANY_NBYTES)
        self.huge_pages = huge_pages

    def open(self, me: int) -> direct.Channel:
        return direct.Channel(self.memory, self.n, me, self.most, huge_pages=self.huge_pages)


@pytest.mark.parametrize("in_place", [True, False])
def test_after_some_sums(in_place):
    if not can_collapse():
        pytest.skip("no huge pages: MADV_COLLAPSE needs Linux 6.1, and transparent_hugepage/enabled not to be never")

    def run(channel: direct.Channel, me: int, n: int) -> None:
        x = memory(NBYTES)
        out = x if in_place else memory(NBYTES)
        for number in range(1, N_SUMS + 3):
            x[:] = np.arange(x.size) % 1000 + me + number
            assert channel.all_reduce(out.ctypes.data, x.ctypes.data, NBYTES, 0, 0, 1, number, 20.0) == direct.DONE
            assert (out == 2 * (np.arange(x.size) % 1000) + 1 + 2 * number).all()
            for each in (x, out):
                huge = huge_nbytes(each.ctypes.data)
                assert huge >= NBYTES - (4 << 20) if number >= N_SUMS else huge == 0, (number, huge)

    assert Huge(2, True).run(run) == [0, 0]


@pytest.mark.parametrize(("huge_pages", "nbytes"), [(False, NBYTES), (True, (4 << 20) - 4)])
def test_neither_small_ones_nor_against_the_setting(huge_pages, nbytes):
    def run(channel: direct.Channel, me: int, n: int) -> None:
        x = memory(nbytes)
        for number in range(1, N_SUMS + 3):
            x[:] = me
            assert channel.all_reduce(x.ctypes.data, x.ctypes.data, nbytes, 0, 0, 1, number, 20.0) == direct.DONE
        assert (x == 1).all() and huge_nbytes(x.ctypes.data) == 0

    assert Huge(2, huge_pages).run(run) == [0, 0]


def test_more_tensors_than_are_counted_are_summed_as_well():
    def run(channel: direct.Channel, me: int, n: int) -> None:
        xs = [memory(4 << 20) for _ in range(70)]
        for turn in range(2):
            for i, x in enumerate(xs):
                x[:] = me + i
                number = 100 * turn + i + 1
                assert channel.all_reduce(x.ctypes.data, x.ctypes.data, 4 << 20, 0, 0, 1, number, 20.0) == direct.DONE
                assert x[0] == x[-1] == 2 * i + 1

    assert Huge(2, True).run(run) == [0, 0]
