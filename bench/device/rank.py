"""One rank of `bench device`, whose gradients lie on a device: its timed operations and its other measurements."""
from __future__ import annotations

from typing import Any

import bpsfast
from bpsfast.bench.device.backward_pass import BackwardPass
from bpsfast.bench.device.copies import Copies
from bpsfast.bench.device.hardware import Hardware
from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import JobMember, Operation
from bpsfast.orchestration.errors import ConfigError

#: Prefixes of variants of `DeviceRank`: "push_pull of 8", "copies of 8, out" and so on.
SUMS, COPIES = "push_pull of ", "copies of "


def hardware(device: str) -> Hardware:
    """Return the device of this process: "cuda" (its current device) or "host".

    Raises `ConfigError` if *device* is neither, `UnsupportedError` if there is no such device.
    """
    if device == "cuda":
        from bpsfast.bench.device.on_cuda import CudaHardware

        return CudaHardware()
    if device == "host":
        from bpsfast.bench.device.on_host import HostHardware

        return HostHardware()
    raise ConfigError(f"device {device!r}: expected cuda or host")


class DeviceRank(JobMember):
    """One rank on *device* ("cuda", "host"). Variants: `SUMS` n, or `COPIES` n, direction (see `copies`)."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._hardware = hardware(device)
        super().__init__(bpsfast)
        self._copies = Copies(self._hardware)
        self._backward: BackwardPass | None = None

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation of *variant*, on arrays of *nbytes* each."""
        if variant.startswith(SUMS):
            return self._sums(nbytes, int(variant.removeprefix(SUMS)))
        n, _, direction = variant.removeprefix(COPIES).partition(", ")
        return self._copies.operation(direction, nbytes, int(n))

    def _sums(self, nbytes: int, n: int) -> Operation:
        """Return a push_pull of *n* arrays at once, in place, which ends when the stream has the sums."""
        hardware = self._hardware
        arrays = [hardware.array(nbytes // 4) for _ in range(n)]
        names = [f"sum {i + 1} of {n} of {nbytes}" for i in range(n)]
        known_values = hardware.read(arrays[0])

        def run() -> None:
            handles = [hardware.begin(array, name, average=False) for array, name in zip(arrays, names)]
            for handle in handles:
                handle.wait()
            hardware.idle()

        def fill(known: bool) -> None:
            pattern.fill(known_values, self.rank, known)
            for array in arrays:
                hardware.write(array, known_values)

        return Operation(run, fill, lambda: sum(pattern.n_wrong(hardware.read(array), self.size) for array in arrays))

    def close(self) -> None:
        """End the streams of copies, and leave the job."""
        self._copies.close()
        super().close()

    # -- other measurements ----------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return a description of the device."""
        return self._hardware.facts()

    def backward(self, exchanges: bool, n_steps: int, shape: tuple[int, int, int]) -> dict[str, Any]:
        """Make *n_steps* steps of `BackwardPass` of *shape* (layers, bytes, products) after one to warm up."""
        if self._backward is None:
            self._backward = BackwardPass(self._hardware, self.rank, self.size, *shape)
        bpsfast.barrier()
        self._backward.step(exchanges)
        steps = [self._backward.step(exchanges)._asdict() for _ in range(n_steps)]
        return {"steps": steps, "n_wrong": self._backward.n_wrong() if exchanges else 0}

    def profile(self) -> dict[str, Any]:
        """Find waits within backward with torch's profiler (`profiled`)."""
        from bpsfast.bench.device import profiled

        return profiled.measure()

    def train(self, n_steps: int) -> dict[str, Any]:
        """Train the digits' network (`digits`)."""
        from bpsfast.bench.device import digits

        return digits.train("cpu" if self._device == "host" else "cuda", n_steps)._asdict()

    def footprint(self, method: str, nbytes: int) -> dict[str, Any]:
        """Return the memory that *method* takes (`footprint`)."""
        from bpsfast.bench.device import footprint

        return footprint.measure(self._hardware, method, nbytes)._asdict()
