"""For `bench kernels`: builds an optimised C reference of the fused sum with the machine's gcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bpsfast.base.process_identity import folder_prefix

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")

# Intrinsics only for non-temporal stores, which plain C does not have; the order of additions is unchanged.
SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512 vector;
#define LOAD _mm512_load_ps
#define ADD _mm512_add_ps
#define STREAM _mm512_stream_ps
#elif defined(__AVX__)
#include <immintrin.h>
typedef __m256 vector;
#define LOAD _mm256_load_ps
#define ADD _mm256_add_ps
#define STREAM _mm256_stream_ps
#elif defined(__SSE__)
#include <immintrin.h>
typedef __m128 vector;
#define LOAD _mm_load_ps
#define ADD _mm_add_ps
#define STREAM _mm_stream_ps
#endif

/* n is a multiple of 64 and all pointers are 64-byte aligned */
void sum4(float *d, const float *a, const float *b, const float *c, const float *e, size_t n)
{
#ifdef STREAM
    const size_t lanes = sizeof(vector) / sizeof(float);
#pragma GCC unroll 4
    for (size_t i = 0; i < n; i += lanes)
        STREAM(d + i, ADD(ADD(ADD(LOAD(a + i), LOAD(b + i)), LOAD(c + i)), LOAD(e + i)));
    _mm_sfence();
#else
    for (size_t i = 0; i < n; i++)
        d[i] = ((a[i] + b[i]) + c[i]) + e[i];
#endif
}
"""


def build_sum4() -> tuple[Callable[..., None] | None, str]:
    """Compile and load ``sum4(d, a, b, c, e, n)``; return (None, reason) if that is impossible."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None, "no gcc on the PATH (apt install gcc): the C reference is left out"
    with tempfile.TemporaryDirectory(prefix=folder_prefix("bench")) as folder:
        source, library = Path(folder, "sum4.c"), Path(folder, "sum4.so")
        source.write_text(SOURCE)
        built = subprocess.run(
            [gcc, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True, timeout=60, check=False
        )
        if built.returncode:
            return None, f"gcc {' '.join(FLAGS)} failed, the C reference is left out: {built.stderr.strip()[-300:]}"
        function = ctypes.CDLL(str(library)).sum4  # the mapping outlives the file
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_size_t]
    function.restype = None
    version = subprocess.run([gcc, "--version"], capture_output=True, text=True, timeout=60, check=True)
    return function, f"{version.stdout.splitlines()[0]}, {' '.join(FLAGS)}"
