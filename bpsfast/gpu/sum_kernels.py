"""CUDA kernels, one for each dtype, that sum the inputs of ranks on one GPU, bit for bit as the node process does.

The source uses nothing of CUDA but the names of threads and blocks, so tests compile it for the host. Terms are added
from the first member on; 16-bit floats in f32, rounded once to nearest even. NaN is the quiet one.
"""
from __future__ import annotations

import functools
from typing import Any

from .cuda import cupy

#: sum_<dtype>(target, own, windows, offset, place, n_members, n), in elements of the wire dtype. *windows* has the
#: addresses of all members' windows, where inputs lie at *offset*; that of member *place* lies at *own* instead.
SOURCE = r"""
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
union Word32 { float value; u32 bits; };
union Word64 { double value; u64 bits; };

static DEVICE float float_of(u32 bits) { Word32 word; word.bits = bits; return word.value; }
static DEVICE u32 bits_of(float value) { Word32 word; word.value = value; return word.bits; }

static DEVICE float widen_bfloat16(u16 x) { return float_of((u32)x << 16); }

static DEVICE u16 narrow_bfloat16(float x)
{
    u32 bits = bits_of(x);
    if (x != x) return 0x7FC0;
    return (u16)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

static DEVICE float widen_float16(u16 x)
{
    u32 magnitude = x & 0x7FFFu, sign = (u32)(x & 0x8000u) << 16;
    u32 wide = bits_of(float_of(magnitude << 13) * 5192296858534827628530496329220096.0f); /* 2^112: the biases */
    if (magnitude >= 0x7C00u) wide |= 0x7F800000u;
    return float_of(wide | sign);
}

static DEVICE u16 narrow_float16(float x)
{
    u32 bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu;
    u16 sign = (u16)(bits >> 16 & 0x8000u);
    if (magnitude > 0x7F800000u) return 0x7E00;
    if (magnitude >= 0x47800000u) return sign | 0x7C00; /* 2^16 */
    if (magnitude < 0x38800000u) /* 2^-14: the adder rounds subnormals, whose last place is that of numbers near 0.5 */
        return sign | (u16)(bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u);
    return sign | (u16)((magnitude - 0x38000000u + 0x0FFFu + (magnitude >> 13 & 1u)) >> 13);
}

static DEVICE float quiet_float32(float x) { return x == x ? x : float_of(0x7FC00000u); }

static DEVICE double quiet_float64(double x)
{
    Word64 quiet;
    quiet.bits = 0x7FF8000000000000ull;
    return x == x ? x : quiet.value;
}

#define SAME(x) (x)
#define SUM(name, wire, wide, widen, narrow)                                                                     \
    extern "C" __global__ void sum_##name(wire *target, const wire *own, const u64 *windows, long long offset,   \
                                          long long place, long long n_members, long long n)                     \
    {                                                                                                            \
        long long stride = (long long)gridDim.x * blockDim.x;                                                    \
        for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {               \
            wide total = (wide)0;                                                                                \
            for (long long member = 0; member < n_members; member++) {                                           \
                const wire *piece = member == place ? own : (const wire *)(windows[member] + (u64)offset);       \
                wide term = widen(piece[i]);                                                                     \
                total = member == 0 ? term : (wide)(total + term);                                               \
            }                                                                                                    \
            target[i] = (wire)narrow(total);                                                                     \
        }                                                                                                        \
    }

SUM(float32, float, float, SAME, quiet_float32)
SUM(float64, double, double, SAME, quiet_float64)
SUM(float16, u16, float, widen_float16, narrow_float16)
SUM(bfloat16, u16, float, widen_bfloat16, narrow_bfloat16)
SUM(int8, unsigned char, unsigned char, SAME, SAME)
SUM(uint8, unsigned char, unsigned char, SAME, SAME)
SUM(int32, u32, u32, SAME, SAME)
SUM(int64, u64, u64, SAME, SAME)
"""


@functools.cache
def sum_kernel(dtype: str, number: int) -> Any:
    """Return CuPy's kernel for *dtype* and the current device, *number*: some versions keep only the first device's."""
    compiled = cupy().RawModule(code="#define DEVICE __device__\n" + SOURCE, options=("-std=c++11",))
    return compiled.get_function(f"sum_{dtype}")
