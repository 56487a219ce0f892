"""The memory of one end of `bench ladder`: areas with a list's partitions, each registered once, as in a job."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bpsfast.bench.paper.ladder.shares import SHIFT, Part, offsets, pattern
from bpsfast.pyx import verbs
from bpsfast.pyx.pages import Segment


class Area:
    """Page-aligned, registered memory for *parts*; with *shift* the partitions begin `SHIFT` bytes later."""

    def __init__(self, domain: verbs.ProtectionDomain, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.offsets, nbytes = offsets(parts)
        self._segment = Segment(nbytes, name="bpsfast-ladder")
        self._region = verbs.MemoryRegion(domain, self._segment)
        self._bytes = np.frombuffer(memoryview(self._segment), np.uint8)[:nbytes]
        self.address, self.lkey, self.rkey = self._region.address, self._region.lkey, self._region.rkey

    def begin(self, shift: bool) -> int:
        """Return the address that the partitions' offsets start from."""
        return self.address + (SHIFT if shift else 0)

    def addresses(self, shift: bool) -> list[int]:
        """Return the address of each partition."""
        return [self.begin(shift) + offset for offset in self.offsets]

    def fill(self) -> None:
        """Write the pattern that the service checks."""
        self._bytes.view(np.uint32)[:] = pattern(0, self._bytes.nbytes)

    def clear(self) -> None:
        """Fill the memory with zeros."""
        self._bytes.fill(0)

    def n_wrong(self, shift: bool, wanted: Sequence[bool], begins: Sequence[int]) -> int:
        """Count words of the *wanted* partitions that differ from the pattern; *begins* are offsets at the worker."""
        wrong = 0
        for i, part in enumerate(self.parts):
            if wanted[i]:
                at = self.offsets[i] + (SHIFT if shift else 0)
                expected = pattern(begins[i] + (SHIFT if shift else 0), part.nbytes)
                wrong += int(np.count_nonzero(self._bytes[at:at + part.nbytes].view(np.uint32) != expected))
        return wrong

    def close(self) -> None:
        """Deregister and unmap."""
        del self._bytes
        self._region.close()
        self._segment.close()
