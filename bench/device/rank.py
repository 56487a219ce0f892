"""One rank of a job whose gradients lie on a device: its timed operations and its other measurements."""
from __future__ import annotations

from typing import Any

import bpsfast
from bpsfast.bench.device.beside import Beside
from bpsfast.bench.device.copies import Copies
from bpsfast.bench.device.hardware import Hardware
from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import JobMember, Operation
from bpsfast.orchestration.errors import ConfigError

#: What variants of `DeviceRank` begin with: "push_pull of 8", "copies of 8, out" and so on.
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
    """One rank on *device* ("cuda", "host"). Variants: `SUMS` n, or `COPIES` n, way (see `copies`)."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._hardware = hardware(device)
        super().__init__(bpsfast)
        self._copies = Copies(self._hardware)
        self._beside: Beside | None = None

    def operation(self, variant: str, nbytes: int) -> Operation:
        """Return the operation of *variant*, on arrays of *nbytes* each."""
        if variant.startswith(SUMS):
            return self._sums(nbytes, int(variant.removeprefix(SUMS)))
        n, _, way = variant.removeprefix(COPIES).partition(", ")
        return self._copies.operation(way, nbytes, int(n))

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

    # -- what is asked beside times --------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what the device is."""
        return self._hardware.facts()

    def beside(self, exchanges: bool, n_steps: int, shape: tuple[int, int, int]) -> dict[str, Any]:
        """Make *n_steps* steps of `Beside` of *shape* (layers, bytes, products) after one that does not count."""
        if self._beside is None:
            self._beside = Beside(self._hardware, self.rank, self.size, *shape)
        bpsfast.barrier()
        self._beside.step(exchanges)
        steps = [self._beside.step(exchanges)._asdict() for _ in range(n_steps)]
        return {"steps": steps, "n_wrong": self._beside.n_wrong() if exchanges else 0}

    def profile(self) -> dict[str, Any]:
        """Find waits within backward with torch's profiler (`profiled`)."""
        from bpsfast.bench.device import profiled

        return profiled.measure()

    def train(self, n_steps: int) -> dict[str, Any]:
        """Train the digits' network (`digits`)."""
        from bpsfast.bench.device import digits

        return digits.train("cpu" if self._device == "host" else "cuda", n_steps)._asdict()

    def footprint(self, way: str, nbytes: int) -> dict[str, Any]:
        """Return the memory that one way takes (`footprint`)."""
        from bpsfast.bench.device import footprint

        return footprint.measure(self._hardware, way, nbytes)._asdict()
