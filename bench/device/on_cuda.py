"""For `bench device`: a CUDA device with torch's tensors and current stream. Plain copies use CuPy, as bpsfast's do."""
from __future__ import annotations

import subprocess
from typing import Any

from bpsfast.bench.device.hardware import Floats, Moment, Pinned
from bpsfast.gpu.cuda import cuda_device, cupy
from bpsfast.orchestration.errors import UnsupportedError

_SIDE = 2048  # of the matrices
_READ_ONLY_SUPPORTED = 113  # cudaDevAttrHostRegisterReadOnlySupported: results, which ranks map so, can be pinned
_QUERY = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total"


class CudaMoment:
    """A `Moment` of a CUDA stream, by an event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CudaMoment), "of the same device"
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaHardware:
    """A `Hardware` that is this process's current CUDA device."""

    def __init__(self) -> None:
        cupy()  # raises an error that names what is missing
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(f"torch {torch.__version__} finds no GPU (it is built for CUDA "
                                   f"{torch.version.cuda}): see nvidia-smi")
        self._torch = torch
        number = torch.cuda.current_device()
        self.device = cuda_device(number)
        self.name = self.device.name
        self._where = torch.device("cuda", number)
        self._factors = [torch.rand(_SIDE, _SIDE, device=self._where) for _ in range(2)]
        self._product = torch.empty(_SIDE, _SIDE, device=self._where)

    def array(self, n: int) -> Any:
        return self._torch.zeros(n, dtype=self._torch.float32, device=self._where)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def write(self, array: Any, values: Floats) -> None:
        array.copy_(self._torch.from_numpy(values))
        self.idle()

    def read(self, array: Any) -> Floats:
        values: Floats = array.cpu().numpy()
        return values

    def set(self, array: Any, value: float) -> None:
        array.fill_(value)

    def compute(self, n: int) -> None:
        for _ in range(n):
            self._torch.mm(*self._factors, out=self._product)

    def moment(self) -> CudaMoment:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return CudaMoment(event)

    def begin(self, array: Any, name: str, average: bool) -> Any:
        from bpsfast.torch.ops import push_pull_async_inplace

        return push_pull_async_inplace(array, average=average, name=name)

    def idle(self) -> None:
        self._torch.cuda.current_stream(self._where).synchronize()

    def pinned(self, nbytes: int) -> Pinned:
        """Return memory of cudaHostAlloc, with which bounds are measured everywhere."""
        memory = cupy().cuda.alloc_pinned_memory(nbytes)
        return Pinned(int(memory.ptr), nbytes, memory)

    def allocated_nbytes(self) -> int | None:
        """Return the bytes of torch's tensors and CuPy's arrays."""
        return int(self._torch.cuda.memory_allocated(self._where)) + int(cupy().get_default_memory_pool().used_bytes())

    def facts(self) -> dict[str, Any]:
        module = cupy()
        found = self._torch.cuda.get_device_properties(self._where)
        runtime = module.cuda.runtime
        engines = runtime.getDeviceProperties(self._where.index).get("asyncEngineCount")
        return {"device": found.name, "memory_nbytes": found.total_memory,
                "n_multiprocessors": found.multi_processor_count, "capability": f"{found.major}.{found.minor}",
                "n_copy_engines": engines,
                "pins_read_only": bool(runtime.deviceGetAttribute(_READ_ONLY_SUPPORTED, self._where.index)),
                "driver_cuda": runtime.driverGetVersion(), "runtime_cuda": runtime.runtimeGetVersion(),
                "cupy": module.__version__, "torch": self._torch.__version__, "torch_cuda": self._torch.version.cuda,
                "nvidia_smi": _smi()}


def _smi() -> dict[str, str]:
    """Return what nvidia-smi says, {} where there is none. Taken while nothing is copied: a link may idle slower."""
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",") if done.stdout else []
    return {name: value.strip() for name, value in zip(_QUERY.split(","), values)}
