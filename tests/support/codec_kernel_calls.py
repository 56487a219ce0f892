"""The kernels of compression by address, and difficult values for them."""
from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np

from bpsfast.orchestration.codec import CodecSpec

CODECS = [
    CodecSpec(kind="onebit"),
    CodecSpec(kind="onebit", scaled=False),
    CodecSpec(kind="topk", k=0.01),
    CodecSpec(kind="topk", k=7),
    CodecSpec(kind="topk", k=0.5),
    CodecSpec(kind="randomk", k=0.01, seed=3),
    CodecSpec(kind="randomk", k=9, seed=(1 << 64) - 1),
    CodecSpec(kind="randomk", k=0.5, seed=77),
    CodecSpec(kind="dithering", k=1, seed=5),
    CodecSpec(kind="dithering", k=127, seed=6),
    CodecSpec(kind="dithering", k=1 << 20, l2=True, seed=7),
    CodecSpec(kind="dithering", k=4, natural=True, seed=8),
    CodecSpec(kind="dithering", k=30, natural=True, l2=True, seed=9),
    CodecSpec(kind="float16"),
    CodecSpec(kind="bfloat16"),
    CodecSpec(kind="int8"),
]
_I64, _PTR, _F64 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
ENCODE = ctypes.CFUNCTYPE(_I64, _PTR, _I64, _PTR, _I64, _PTR, _PTR, _I64, _I64, _PTR)
DECODE = ctypes.CFUNCTYPE(_I64, _PTR, _I64, _PTR, _I64, _I64, _I64, _I64, _PTR)
FEED = ctypes.CFUNCTYPE(None, _PTR, _PTR, _PTR, _PTR, _I64, _F64, _F64)
DIVIDE = ctypes.CFUNCTYPE(None, _PTR, _I64, _F64)
NARROW = ctypes.CFUNCTYPE(None, _PTR, _PTR, _I64)


def draw_values(pattern: str, n: int, dtype: np.dtype, seed: int) -> np.ndarray:
    """Return *n* elements of a difficult pattern."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    values = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4)
    if pattern == "equal":
        values = np.where(rng.integers(0, 2, n), 0.75, -0.75)
    elif pattern == "zeros":
        values = np.where(rng.integers(0, 2, n), 0.0, -0.0)
    elif pattern == "few":
        values = np.where(rng.integers(0, 50, n) == 0, values, 0.0)
    with np.errstate(all="ignore"):
        out = values.astype(dtype)
        if pattern == "tiny":
            out = (rng.integers(-200, 201, n) * float(ml_dtypes.finfo(dtype).smallest_subnormal)).astype(dtype)
    if pattern in ("mixed", "infinite"):
        limits = ml_dtypes.finfo(dtype)
        special = [0.0, -0.0, limits.max, -limits.max, limits.tiny, limits.smallest_subnormal, np.inf, -np.inf, np.nan]
        special = np.array([float(each) for each in (special if pattern == "infinite" else special[:6])], dtype)
        np.copyto(out, rng.choice(special, n), where=rng.integers(0, 10, n) == 0)
    elif pattern == "bits":
        out = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype)
        with np.errstate(all="ignore"):
            is_nan = np.isnan(out)
        out = np.where(is_nan & (rng.integers(0, 4, n) > 0), dtype.type(1), out)
    return np.ascontiguousarray(out, dtype)
