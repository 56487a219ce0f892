"""Compiles the CPU kernels that sum partitions, on first use; native code gets their addresses, Python two functions.

The C signature of every kernel::

    void k(void *dst, void **inputs, int64 n_before, int64 n_local, int64 n_after,
           int64 n_elements, int64 divisor, int64 nontemporal)

``inputs`` holds the partials of the nodes before this one, then this node's local inputs, then the partials of
the nodes after it; counts may be 0, not all of them. dst is a separate output (or exactly one of the inputs: a
chunk is loaded from all inputs before it is stored). Rounding is that of `bpsfast.base.reference_sum.reduce`: the local
inputs are added by themselves, rounded once to the wire dtype, take their place in the order; then the average.
The code takes no lock, allocates nothing, raises nothing, needs no GIL, and may run on any number of threads.

There is one for each dtype and op. Compiling takes about 0.4 s each, once for a machine: then `object_cache` loads them
without numba. Where it cannot be used, numba's disk cache is, in ``NUMBA_CACHE_DIR`` if that is set, else beside this
package, else in the user's cache folder; if none of them is writable (a read-only image, no home), each process
compiles for itself.

Importing this package does not import numba: only a process that compiles a kernel needs it.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpsfast.kernels import object_cache
from bpsfast.orchestration.errors import MismatchError, UnsupportedError
from bpsfast.orchestration.placement.partition import BITWISE_OPS, ITEM_NBYTES, OPS

if TYPE_CHECKING:  # a node needs the kernels' addresses only, and NumPy is a third of the time in which it starts
    import numpy as np

    Array = np.ndarray[Any, Any]

# Outputs of this size or more are stored past the caches by default: smaller ones are read again from L2 or L3; for
# larger ones the read-for-ownership of plain stores would cost 1.25 to 1.5 times the time.
NONTEMPORAL_NBYTES = 1 << 20

#: Of every kernel. Calling one by it releases the GIL.
SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 6)

# No writable folder, a full disk, a damaged or foreign entry (unpickled, it may raise anything) must not fail a job.
CACHE_FAULTS = (RuntimeError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError,
                pickle.PickleError)

_lock = threading.Lock()
#: The kernels by name and dtype: numba cfuncs or `object_cache.LoadedKernel`, which own the machine code, for the life
#: of the process.
_compiled: dict[tuple[str, ...], Any] = {}


def compiled_address(key: tuple[str, ...], compile_kernel: Callable[[], Any]) -> int:
    """Return the address of the kernel *key*, for which *compile_kernel* is called on first use; any thread."""
    with _lock:
        if key not in _compiled:
            _compiled[key] = compile_kernel()
        return int(_compiled[key].address)


def self_contained_address(key: tuple[str, ...], source: str, compile_kernel: Callable[[bool], Any]) -> int:
    """As `compiled_address`, of a kernel that calls nothing of numba's, so its machine code can be kept and loaded.

    *source*: the file of this package that it comes from; the argument of *compile_kernel*: whether to use numba's disk
    cache, which has no objects to give.
    """
    def load_or_compile() -> Any:
        found = object_cache.load(key)
        if found is None and object_cache.is_usable():
            made = compile_kernel(False)
            if object_cache.save(key, made):
                return made
        return found or with_cache(str(Path(__file__).with_name(source)), compile_kernel)

    return compiled_address(key, load_or_compile)


def address(dtype_name: str, op: str = "sum") -> int:
    """Return the address of the kernel of a wire dtype that combines by *op* (`partition.OPS`); any thread.

    It is compiled on first use, and lives as long as the process. Raises `UnsupportedError` for a name or an op that
    there is no kernel for.
    """
    if dtype_name not in ITEM_NBYTES:
        raise UnsupportedError(f"wire dtype {dtype_name!r} is unknown; bpsfast sums {', '.join(ITEM_NBYTES)}")
    if op not in OPS or ("float" in dtype_name and op in BITWISE_OPS):
        raise UnsupportedError(f"there is no kernel for the {op} of {dtype_name}; ops: {', '.join(OPS)}, the bitwise "
                               "ones for integers")
    def compile_kernel(cache: bool) -> Any:
        from bpsfast.kernels import sum_ir

        return sum_ir.compile_kernel(dtype_name, cache, op)

    return self_contained_address((op, dtype_name), "sum_ir.py", compile_kernel)


def warm(dtype_names: Iterable[str] = tuple(ITEM_NBYTES)) -> None:
    """Compile or load the kernels of these wire dtypes now, so that the first sums need not wait."""
    for name in dtype_names:
        address(name)


def assembly(dtype_name: str) -> str:
    """Compile the kernel again and return its machine code as text."""
    from bpsfast.base import dtypes
    from bpsfast.kernels import sum_ir

    return str(sum_ir.compile_kernel(dtypes.lookup(dtype_name).name, cache=False)._library.get_asm_str())


def with_cache(source: str, compile_kernel: Callable[[bool], Any]) -> Any:
    """Return *compile_kernel*'s kernel of the file *source*, with numba's disk cache (argument True) if possible."""
    if has_cache_folder(Path(source).parent):
        # A fault of the kernel itself comes up again below, where it is compiled without the cache.
        with contextlib.suppress(*CACHE_FAULTS):
            return compile_kernel(True)
    return compile_kernel(False)


def has_cache_folder(package: Path) -> bool:
    """Return whether numba may try its list of cache folders.

    The last one is the user's cache folder; without HOME and without an entry for the user id numba would make a folder
    called ``~`` in the working directory.
    """
    if os.path.isabs(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~")):
        return True
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    return _may_write(package / "__pycache__") or (bool(chosen) and _may_write(Path(str(chosen))))


def _may_write(folder: Path) -> bool:
    """Return whether *folder* can be written, or made."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def fused_sum(dst: Array, before: Sequence[Array], local: Sequence[Array], after: Sequence[Array], divisor: int = 1,
              nontemporal: bool | None = None, op: str = "sum") -> None:
    """Write to *dst* the two-level sum of *before*, *local*, *after*, divided by *divisor* (1: no average).

    Another *op* combines them otherwise, in the same order.

    All arrays are 1-D, contiguous, of one length and one wire dtype; dst overlaps no input. The GIL is released.
    *nontemporal* None decides by size; stores of a dst that is not 64-byte aligned are plain in any case.

    Raises `UnsupportedError` for a dtype, layout, overlap or divisor that has no kernel, `MismatchError` where
    lengths or dtypes differ.
    """
    import numpy as np

    inputs = [*before, *local, *after]
    if not inputs:
        raise UnsupportedError("fused_sum got no input: before, local and after are all empty")
    if not 1 <= divisor < 1 << 24:  # up to here f32 holds it exactly
        raise UnsupportedError(f"fused_sum cannot divide by {divisor}: the divisor is 1 or more and below 2^24")
    name = _check("dst", dst, dst)
    if not dst.flags.writeable:
        raise UnsupportedError("dst is read-only; fused_sum writes its result there")
    for i, array in enumerate(inputs):
        _check(f"input {i}", array, dst)
        if np.may_share_memory(dst, array):
            raise UnsupportedError(f"input {i} overlaps dst; fused_sum needs a separate output (see add_into)")
    if nontemporal is None:
        nontemporal = dst.nbytes >= NONTEMPORAL_NBYTES
    _call(name, op, dst, inputs, (len(before), len(local), len(after)), divisor, nontemporal)


def add_into(dst: Array, src: Array) -> None:
    """Add *src* to *dst* in place, in dst's accumulator, rounded once; NaN results are the canonical quiet NaN.

    Both are 1-D, contiguous, of one length and one wire dtype; they may be the same array, but not overlap
    otherwise. The GIL is released. Raises `UnsupportedError` or `MismatchError` as `fused_sum` does.
    """
    import numpy as np

    name = _check("dst", dst, dst)
    _check("src", src, dst)
    if not dst.flags.writeable:
        raise UnsupportedError("dst is read-only; add_into writes its result there")
    if np.may_share_memory(dst, src) and dst.ctypes.data != src.ctypes.data:
        raise UnsupportedError("src overlaps dst at another offset; copy one of them first")
    _call(name, "sum", dst, [dst, src], (2, 0, 0), 1, False)


def _check(role: str, array: Any, dst: Array) -> str:
    """Return the wire dtype of *array*; raise if a kernel cannot read it."""
    import numpy as np

    from bpsfast.base import dtypes

    if not isinstance(array, np.ndarray):
        raise UnsupportedError(f"{role} is a {type(array).__name__}; the kernels take NumPy arrays")
    name = dtypes.wire_name(array.dtype)
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise UnsupportedError(f"{role} has shape {array.shape} and strides {array.strides}; the kernels take 1-D "
                               "contiguous, aligned arrays (np.ascontiguousarray(x).reshape(-1))")
    if array.dtype != dst.dtype or array.size != dst.size:
        raise MismatchError(f"{role} is {array.size} x {array.dtype}, dst is {dst.size} x {dst.dtype}")
    return name


@functools.cache
def _function(name: str, op: str) -> Any:
    """Return a kernel as a ctypes function; calling it releases the GIL."""
    return SIGNATURE(address(name, op))


def _call(name: str, op: str, dst: Array, inputs: Sequence[Array], counts: tuple[int, int, int], divisor: int,
          nontemporal: bool) -> None:
    pointers = (ctypes.c_void_p * len(inputs))(*[array.ctypes.data for array in inputs])
    _function(name, op)(dst.ctypes.data, ctypes.addressof(pointers), *counts, dst.size, divisor, int(nontemporal))


def no_sum_address() -> int:
    """Return the address of a kernel that does nothing, for the setting ``sums=off``; any thread.

    Nodes then move bytes, and what they would sum stays garbage: benches measure network and engine alone.
    """
    def compile_kernel() -> Any:
        from numba import cfunc, types

        return cfunc(types.void(types.voidptr, types.voidptr, *[types.int64] * 6))(_nothing)

    return compiled_address(("no sum",), compile_kernel)


def _nothing(dst, inputs, n_before, n_local, n_after, n_elements, divisor, nontemporal):  # type: ignore[no-untyped-def]
    return
