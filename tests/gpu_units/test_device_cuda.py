"""CUDA through CuPy: what it does on a GPU; that CuPy, where it is, has what is called; what is said without it."""
from __future__ import annotations

import ast
import importlib.util
import inspect
import threading
from pathlib import Path

import numpy as np
import pytest

from bpsfast.gpu import cuda
from bpsfast.orchestration.errors import BpsError, DeviceError, UnsupportedError
from bpsfast.trainer.tensor_input import tensor_input

HAS_CUPY = importlib.util.find_spec("cupy") is not None
DEVICE = Path(cuda.__file__).parent


def why_no_gpu():
    try:
        cuda.cupy()
    except BpsError as exc:
        return str(exc)
    return ""


with_gpu = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())


def called(path):
    """Return (dotted name after CuPy's module, number of arguments, keywords) of each use of CuPy in *path*."""
    roots = {"cupy()": "", "module": "", "runtime": "cuda.runtime"}
    found = set()
    for node in ast.walk(ast.parse(path.read_text().replace("self._runtime", "runtime"))):
        call = node if isinstance(node, ast.Call) else None
        parts, inner = [], node.func if call else node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        root = ast.unparse(inner)
        if parts and root in roots and parts[0] != "__version__":
            name = ".".join(filter(None, [roots[root], *parts]))
            found.add((name, len(call.args), tuple(word.arg for word in call.keywords)) if call else (name, None, ()))
    return found


USED = sorted(set().union(*(called(path) for path in sorted(DEVICE.glob("*.py")))), key=str)


def test_what_is_called_was_found():
    names = {name for name, _, _ in USED}
    assert {"cuda.Event", "cuda.Stream", "cuda.runtime.memcpyAsync", "cuda.runtime.eventQuery",
            "cuda.runtime.hostRegister", "cuda.runtime.ipcOpenMemHandle", "RawModule",
            "cuda.runtime.setDevice", "cuda.runtime.pointerGetAttributes", "zeros"} <= names
    assert "cuda.ExternalStream" not in names, "deprecated since CuPy 14"


@pytest.mark.skipif(not HAS_CUPY, reason="CuPy is not installed")
def test_cupy_has_what_is_called():
    import cupy

    for name, n_arguments, words in USED:
        if name.startswith("cuda.nccl") and not hasattr(cupy.cuda, "nccl"):
            continue  # NCCL's library is not here
        found = cupy
        for part in name.split("."):
            found = getattr(found, part)
        if n_arguments is None:
            continue
        try:
            inspect.signature(found).bind(*[0] * n_arguments, **dict.fromkeys(words, 0))
        except ValueError:  # compiled: its docstring begins with "hostRegister(intptr_t ptr, size_t size, ...)"
            line = (found.__doc__ or "").partition("\n")[0]
            if "(" in line:
                declared = list(filter(None, line.partition("(")[2].rpartition(")")[0].split(", ")))
                names = [each.partition("=")[0].split()[-1] for each in declared]
                places = names[:names.index("*")] if "*" in names else names
                needed = {name for name, each in zip(names, declared) if "=" not in each} - {"*"}
                assert n_arguments <= len(places) and needed <= {*places[:n_arguments], *words} <= set(names), line


@pytest.mark.skipif(not HAS_CUPY, reason="CuPy is not installed")
def test_cupy_takes_a_stream_of_ours_for_one():
    import cupy

    if not hasattr(cupy.cuda.Stream, "from_external"):
        pytest.skip(f"CuPy {cupy.__version__} has no Stream.from_external")
    assert cupy.cuda.Stream.from_external(cuda.CudaStream(None, 4096, None)).ptr == 4096


def test_each_thread_has_a_default_stream_of_its_own():
    """Events of two threads have no order, though both call their stream cudaStreamPerThread."""
    origins = []

    def look():
        origins.append([cuda.CudaEvent(None, "cuda:0", handle).origin for handle in (1, 2)])

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert origins[0][0] == origins[1][0]
    assert origins[0][1] != origins[1][1]


@pytest.mark.skipif(HAS_CUPY, reason="CuPy is installed")
def test_without_cupy_it_says_what_to_install():
    for call in cuda.cupy, lambda: cuda.cuda_device(0), lambda: cuda.CudaDevice(0):
        with pytest.raises(UnsupportedError, match=r"pip install bpsfast\[cuda\]"):
            call()


@pytest.fixture
def device():
    return cuda.cuda_device(0)


@with_gpu
def test_there_and_back(device):
    import cupy

    pages = np.zeros(1 << 20, np.uint8)
    x = cupy.arange(1 << 18, dtype="f4")
    location = tensor_input(x).location
    device.pin(pages.ctypes.data, pages.nbytes, True)
    stream = device.stream()
    stream.wait(location.ready)
    stream.copy(pages.ctypes.data, x.data.ptr, x.nbytes, to_host=True)
    assert stream.record().wait(10)
    assert (pages.view("f4") == np.arange(1 << 18)).all()
    pages.view("f4")[:] *= 2
    stream.copy(x.data.ptr, pages.ctypes.data, x.nbytes, to_host=False)
    location.caller().wait(stream.record())
    assert (x.get() == 2 * np.arange(1 << 18)).all()
    device.unpin(pages.ctypes.data)
    device.unpin(pages.ctypes.data)  # raises nothing


@with_gpu
def test_events_of_a_stream(device):
    stream, other = device.stream(), device.stream()
    first, second = stream.record(), stream.record()
    assert first.origin == second.origin != other.record().origin
    assert second.wait(10.0)
    assert first.done()


@with_gpu
def test_pages_are_pinned_once(device):
    pages = np.zeros(1 << 16, np.uint8)
    device.pin(pages.ctypes.data, pages.nbytes, True)
    with pytest.raises(DeviceError, match="pinning 65536 bytes"):
        device.pin(pages.ctypes.data, pages.nbytes, True)
    device.unpin(pages.ctypes.data)


@with_gpu
def test_a_number_that_is_not_there():
    with pytest.raises(UnsupportedError, match="there is no device cuda:99"):
        cuda.cuda_device(99)
