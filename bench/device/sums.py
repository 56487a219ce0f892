"""The push_pull of arrays on a device, in place, one or several at once, until the stream finds the sums."""
from __future__ import annotations

from bpsfast.bench.device.hardware import Hardware
from bpsfast.bench.harness import pattern
from bpsfast.bench.harness.contestant import Operation


def operation(hardware: Hardware, rank: int, size: int, nbytes: int, n: int) -> Operation:
    """Return the operation that sums *n* arrays of *nbytes* each over all *size* ranks."""
    arrays = [hardware.array(nbytes // 4) for _ in range(n)]
    names = [f"sum {i + 1} of {n} of {nbytes}" for i in range(n)]
    known_values = hardware.read(arrays[0])

    def run() -> None:
        handles = [hardware.begin(array, name, average=False) for array, name in zip(arrays, names)]
        for handle in handles:
            handle.wait()
        hardware.idle()

    def fill(known: bool) -> None:
        pattern.fill(known_values, rank, known)
        for array in arrays:
            hardware.write(array, known_values)

    def n_wrong() -> int:
        return sum(pattern.n_wrong(hardware.read(array), size) for array in arrays)

    return Operation(run, fill, n_wrong)
