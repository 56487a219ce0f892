"""The bound of `bench device`: the same bytes copied plainly, by all ranks at once, without sums.

Sums and copies overlap, and so do both directions of PCIe, where every copy has an engine of its own. So a stream of
tensors takes at least as long as copying all of them out and all of them in at the same time, with the contention that
this has (`BOTH`). One tensor goes out, and then in (`AFTER`): its latency is the sum of both. A tensor whose partitions
overlap may be faster than that.

`OUT` and `IN` are the two directions alone: the longer of them is the bound on a machine without that contention.
"""
from __future__ import annotations

from typing import Any

from bpsfast.bench.device.hardware import Hardware, Pinned
from bpsfast.bench.harness.contestant import Operation

AFTER, BOTH, OUT, IN = "out, then in", "out and in at once", "out", "in"


class Copies:
    """Copies of one rank."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._out, self._in = hardware.device.stream(), hardware.device.stream()
        self._pinned: dict[str, Pinned] = {}

    def operation(self, direction: str, nbytes: int, n: int) -> Operation:
        """Return the operation that copies *n* arrays of *nbytes* in *direction*, each to separate memory."""
        hardware = self._hardware
        arrays = [hardware.array(nbytes // 4) for _ in range(n)]
        addresses = [hardware.address(array) for array in arrays]
        there = self._memory("out", n * nbytes)
        here = there if direction == AFTER else self._memory("in", n * nbytes)

        def run() -> None:
            if direction != IN:
                for i, address in enumerate(addresses):
                    self._out.copy(there.address + i * nbytes, address, nbytes, to_host=True)
            if direction == AFTER:
                self._in.wait(self._out.record())
            if direction != OUT:
                for i, address in enumerate(addresses):
                    self._in.copy(address, here.address + i * nbytes, nbytes, to_host=False)
            self._out.record().wait()
            self._in.record().wait()

        return Operation(run, lambda known: _zero(hardware, arrays), lambda: 0)

    def _memory(self, name: str, nbytes: int) -> Pinned:
        """Return pinned memory of *nbytes* or more; operations share it."""
        found = self._pinned.get(name)
        if found is None or found.nbytes < nbytes:
            found = self._pinned[name] = self._hardware.pinned(nbytes)
        return found

    def close(self) -> None:
        """End the streams."""
        self._out.close()
        self._in.close()


def _zero(hardware: Hardware, arrays: list[Any]) -> None:
    for array in arrays:
        hardware.set(array, 0.0)
    hardware.idle()
