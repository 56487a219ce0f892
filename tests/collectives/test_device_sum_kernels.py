"""The CUDA kernels' source, compiled for the host: every dtype's sums have the bits of the reference."""
from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bpsfast.base.dtypes import TABLE
from bpsfast.base.reference_sum import reduce
from bpsfast.gpu.communicator import DTYPES
from bpsfast.gpu.sum_kernels import SOURCE

#: One thread does it all.
_PRELUDE = """
#define DEVICE
#define __global__
struct Index { long long x; };
static Index gridDim = {1}, blockDim = {1}, blockIdx = {0}, threadIdx = {0};
"""
_N = 20_000


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The source as a library. -Werror: NVRTC is no place to find a slip."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    (folder / "sums.cpp").write_text(_PRELUDE + SOURCE)
    subprocess.run(["g++", "-std=c++11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC",
                    "-o", folder / "sums.so", folder / "sums.cpp"], check=True, timeout=60)
    return ctypes.CDLL(str(folder / "sums.so"))


def added(library: ctypes.CDLL, dtype: str, pieces: list[np.ndarray], place: int, offset: int) -> np.ndarray:
    """Return what the member at *place* gets: the own piece by its address, others' at *offset* of windows."""
    windows = np.array([piece.ctypes.data - offset for piece in pieces], np.uint64)
    own, windows[place] = pieces[place].ctypes.data, 0
    target = np.empty_like(pieces[0])
    numbers = [ctypes.c_longlong(each) for each in (offset, place, len(pieces), target.size)]
    getattr(library, f"sum_{dtype}")(ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(own),
                                     ctypes.c_void_p(windows.ctypes.data), *numbers)
    return target


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("n_members", [1, 2, 3, 8])
def test_any_bits(compiled: ctypes.CDLL, dtype: str, n_members: int) -> None:
    """Subnormals, infinities, NaN of all kinds, -0.0: whatever bits there are."""
    row, random = TABLE[dtype], np.random.default_rng(n_members)
    pieces = [random.integers(0, 256, _N * row.itemsize, np.uint8).view(row.numpy) for _ in range(n_members)]
    got = added(compiled, dtype, pieces, n_members // 2, 1 << 20)
    assert got.tobytes() == reduce([pieces], False).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_half_beside_every_exponent(compiled: ctypes.CDLL, dtype: str) -> None:
    """All 65536 values, alone and with terms that make ties, carries and subnormal sums of them."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for other in (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC01, 0x7BFF, 0x7F7F, 0xFC00, 0x4001):
        pieces = [every.view(TABLE[dtype].numpy), np.full(1 << 16, other, np.uint16).view(TABLE[dtype].numpy)]
        assert added(compiled, dtype, pieces, 0, 64).tobytes() == reduce([pieces], False).tobytes(), hex(other)


def test_terms_are_added_in_the_order_of_members(compiled: ctypes.CDLL) -> None:
    pieces = [np.full(3, value, np.float32) for value in (1e8, 1.0, -1e8)]
    assert added(compiled, "float32", pieces, 1, 0).tolist() == [0.0] * 3
    assert added(compiled, "float32", [pieces[0], pieces[2], pieces[1]], 1, 0).tolist() == [1.0] * 3
