"""One end of a connection between the guest's devices, made by either provider; what the verbs suites share."""
from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from tests.guest.hosts import DEVICES, GID_INDEX

NBYTES = 1 << 16
TIMEOUT_S = 30.0


class End:
    """A device with a domain, a completion queue for both directions, a queue pair and registered memory."""

    def __init__(self, verbs: ModuleType, name: str, *, depth: int = 64, events: bool = False, max_send: int = 16,
                 max_recv: int = 16, max_inline: int = 64, nbytes: int = NBYTES) -> None:
        with contextlib.ExitStack() as stack:
            self.device = stack.enter_context(verbs.Device(name))
            self.domain = stack.enter_context(verbs.ProtectionDomain(self.device))
            self.queue = stack.enter_context(verbs.CompletionQueue(self.device, depth, events=events))
            self.bytes = np.zeros(nbytes, np.uint8)
            self.region = stack.enter_context(
                verbs.MemoryRegion(self.domain, self.bytes, remote_write=True, remote_read=True))
            self.pair = stack.enter_context(verbs.QueuePair(
                self.domain, self.queue, self.queue, max_send=max_send, max_recv=max_recv, max_inline=max_inline))
            self._stack = stack.pop_all()

    @property
    def at(self) -> int:
        """Address of the memory."""
        return self.region.address

    def connect(self, peer: Any, *, init: dict[str, Any] | None = None, rtr: dict[str, Any] | None = None,
                rts: dict[str, Any] | None = None) -> None:
        """Bring the queue pair up towards *peer*, another end or whatever has a `number`, `psn` and `gid`."""
        self.pair.to_init(1, **{"remote_read": True} | (init or {}))
        if isinstance(peer, End):
            number, psn, gid = peer.pair.number, peer.pair.psn, peer.device.gid(1, GID_INDEX)
        else:
            number, psn, gid = peer.number, peer.psn, peer.gid
        self.pair.to_rtr(number, psn, **{"gid": gid, "gid_index": GID_INDEX, "mtu": 1024} | (rtr or {}))
        self.pair.to_rts(**{"timeout": 10, "retry_count": 3, "rnr_retry": 0} | (rts or {}))

    def write(self, peer: Any, nbytes: int = 8, wr_id: int = 1, **how: Any) -> None:
        """Write the first *nbytes* of our memory to the same place in *peer*'s."""
        self.pair.post_write(wr_id, self.at, nbytes, self.region.lkey, peer.region.address, peer.region.rkey, **how)

    def receive(self, wr_id: int = 1, nbytes: int = 0, offset: int = 0) -> None:
        self.pair.post_recv(wr_id, self.at + offset, nbytes, self.region.lkey)

    def completions(self, n: int = 1) -> list[tuple[Any, ...]]:
        """Poll until *n* completions came."""
        found: list[tuple[Any, ...]] = []
        until(lambda: found.extend(self.queue.poll(n - len(found))) or len(found) == n)
        return found

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> End:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def connected(verbs: ModuleType, *, rtr: dict[str, Any] | None = None, rts: dict[str, Any] | None = None,
              **how: Any) -> Iterator[tuple[End, End]]:
    """Two connected ends, rxe0 and rxe1."""
    with End(verbs, DEVICES[0], **how) as left, End(verbs, DEVICES[1], **how) as right:
        left.connect(right, rtr=rtr, rts=rts)
        right.connect(left, rtr=rtr, rts=rts)
        yield left, right


def until(is_so: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    """Ask again and again; AssertionError after *timeout_s*."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {timeout_s:g} s"


def kernel_objects() -> dict[str, dict[str, int]]:
    """Return how many objects of each kind the kernel has, by device (``rdma resource show``)."""
    shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, timeout=60, check=True).stdout
    return {name: {kind: int(n) for kind, n in re.findall(r"(\w+) (\d+)", rest)}
            for name, rest in re.findall(r"^\d+: (\w+): (.*)$", shown, re.M)}
