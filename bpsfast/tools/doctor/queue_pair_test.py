"""A queue pair to the peer, as a job would make it, that carries some data: a try instead of a guess.

It shows what no file shows: a filter on UDP 4791, a GID that does not lead there, an MTU that a switch does not pass.
The acknowledgement has to come back, so one write proves both directions.
"""
from __future__ import annotations

import mmap
import os
import time
from typing import Any

import msgspec

from ...hardware.rdma_route import Rail
from ...hardware.verbs import completions

#: Enough for several packets of any path MTU.
NBYTES = 64 * 1024
_WR_ID = 1
#: 4.096 us * 2^16 = 0.27 s without an acknowledgement, three times again
_TIMEOUT, _RETRIES = 16, 3


class QueuePairAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What one end tells the other: its queue pair, where that is, and where to write."""

    port: str
    number: int
    psn: int
    link_layer: str
    gid: bytes
    lid: int
    mtu: int
    address: int
    rkey: int


class QueuePairTest:
    """One queue pair on *rail*, with `NBYTES` registered bytes. Owner thread only; a context manager.

    Raises
    ------
    OSError
        A verb fails; the text says which, and with what.
    """

    def __init__(self, verbs: Any, rail: Rail) -> None:
        self._rail = rail
        self._closing: list[Any] = []
        try:
            self._memory = self._keep(mmap.mmap(-1, NBYTES))
            device = self._keep(verbs.Device(rail.device))
            domain = self._keep(verbs.ProtectionDomain(device))
            self._region = self._keep(verbs.MemoryRegion(domain, self._memory))
            self._queue = self._keep(verbs.CompletionQueue(device, 16, events=True))
            self._pair = self._keep(verbs.QueuePair(domain, self._queue, self._queue, max_send=4, max_recv=4))
            self._pair.to_init(rail.port)
            port = device.port(rail.port)
        except BaseException:
            self.close()
            raise
        self.end = QueuePairAddress(port=rail.name, number=self._pair.number, psn=self._pair.psn, link_layer=port["link_layer"],
                       gid=rail.gid.value if rail.gid else b"", lid=port["lid"], mtu=port["active_mtu"],
                       address=self._region.address, rkey=self._region.rkey)

    def connect(self, other: QueuePairAddress) -> None:
        """Connect to the other end's queue pair."""
        self._pair.to_rtr(other.number, other.psn, mtu=min(self.end.mtu, other.mtu), port=self._rail.port,
                          **self._rail.path(self.end.link_layer, other.lid, other.gid))
        self._pair.to_rts(timeout=_TIMEOUT, retry_count=_RETRIES)

    def write(self, other: QueuePairAddress, timeout_s: float) -> str:
        """Write all bytes to the other end; return "" when they were acknowledged, else why not, in words."""
        self._memory[:16] = os.urandom(16)
        self._pair.post_write(_WR_ID, self._region.address, NBYTES, self._region.lkey, other.address, other.rkey)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            for _, status, *_ in self._queue.poll():
                failure = getattr(self._pair, "failure", None) or {}
                return "" if status == completions.SUCCESS else str(completions.explain(
                    status, failure.get("vendor_error", 0)))
            self._queue.wait(left)
        return (f"a write of {NBYTES} bytes from {self.end.port} to {other.port} was neither acknowledged nor given up "
                f"within {timeout_s:g} s")

    def _keep(self, each: Any) -> Any:
        self._closing.append(each)
        return each

    def close(self) -> None:
        """Close everything, the youngest first. Idempotent."""
        while self._closing:
            self._closing.pop().close()

    def __enter__(self) -> QueuePairTest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
