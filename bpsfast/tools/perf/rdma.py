"""One end of a ``bpsfast perf`` measurement over RDMA: opens device, memory and queue pairs, and runs the loop.

Each queue pair has a source buffer (of writes and sends, or for data that was read) and a landing buffer for the peer's
data; all messages of a size use the same ones. The loop is native for our verbs (`bpsfast.pyx.perf.VerbsLoop`), and
`python_loop.ProviderLoop` for others.
"""
from __future__ import annotations

import contextlib
import errno
import time
from typing import Any

from ...hardware.affinity.binding import device_cores, on_cores
from ...hardware.host import Host
from ...hardware.nic_counters import CounterSnapshot, snapshot
from ...hardware.rdma_route import Rail
from ...hardware.verbs import completions, provider
from ...orchestration.errors import BpsError, ConfigError, PeerLostError, StallError, UnsupportedError
from ...pyx import perf as native
from ...pyx.pages import Segment
from .perf_plan import Plan
from .python_loop import ProviderLoop

#: Most seconds to wait for fresh counters; drivers cache them for milliseconds by default.
_LONGEST_LIFESPAN_S = 0.1
#: perftest's default for latency.
_INLINE_NBYTES = 220
_ALIGNMENT = 4096
#: A pure receiver sleeps after this long without completions; data arrives meanwhile.
_IDLE_S = 100e-6
_NAP_S = 10e-3


class RdmaEnd:
    """The queue pairs of this side to one peer on one port. Owner thread, except `expect` and `cancel`."""

    def __init__(self, plan: Plan, rail: Rail, provider_name: str, host: Host) -> None:
        self.plan, self.rail, self.host = plan, rail, host
        self._is_native = provider_name == "native"
        self._cores = device_cores(host, rail.device, plan.cores)
        self._undo = contextlib.ExitStack()
        self._loop: Any = None
        try:
            self._open(provider(provider_name))
        except BaseException:
            self._undo.close()
            raise

    def _open(self, verbs: Any) -> None:
        plan, rail = self.plan, self.rail
        keep = self._undo.enter_context
        self.device = keep(verbs.Device(rail.device))
        self.port = self.device.port(rail.port)
        limits = self.device.attributes
        self._max_reads = max(1, min(limits["max_qp_rd_atom"], limits["max_qp_init_rd_atom"], 255))
        self.domain = keep(verbs.ProtectionDomain(self.device))
        self._stride = -(-plan.largest_nbytes // _ALIGNMENT) * _ALIGNMENT
        self._memory = keep(Segment(2 * self._stride * plan.pairs, huge=plan.huge_pages))
        self._region = keep(verbs.MemoryRegion(self.domain, self._memory, remote_read=plan.operation == "read",
                                              relaxed_ordering=plan.relaxed_ordering))
        depth, receive_depth = plan.depth * plan.pairs, plan.receive_depth * plan.pairs
        events = plan.events or plan.verb == "bw"
        self._send_cq = keep(verbs.CompletionQueue(self.device, depth, events=plan.events))
        self._recv_cq = keep(verbs.CompletionQueue(self.device, receive_depth, events=events))
        self._inline_nbytes = self._possible_inline(verbs)
        self.pairs = [keep(self._pair(verbs, self._inline_nbytes)) for _ in range(plan.pairs)]

    def _pair(self, verbs: Any, inline_nbytes: int) -> Any:
        return verbs.QueuePair(self.domain, self._send_cq, self._recv_cq, max_send=self.plan.depth,
                               max_recv=self.plan.receive_depth, max_inline=inline_nbytes)

    def _possible_inline(self, verbs: Any) -> int:
        """Return the size of -I, or by default perftest's for latency unless the device refuses it."""
        if self.plan.inline_nbytes >= 0:
            return self.plan.inline_nbytes
        if self.plan.verb != "lat" or self.plan.operation == "read":
            return 0
        try:
            self._pair(verbs, _INLINE_NBYTES).close()
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOMEM):
                raise
            return 0
        return _INLINE_NBYTES

    def offer(self) -> dict[str, Any]:
        """Return what the peer needs to connect."""
        return {
            "link_layer": self.port["link_layer"], "lid": self.port["lid"], "mtu": self.port["active_mtu"],
            "gid": self.rail.gid.value if self.rail.gid else b"", "pkey": self.rail.pkey, "reads": self._max_reads,
            "numbers": [pair.number for pair in self.pairs], "psns": [pair.psn for pair in self.pairs],
            "address": self._region.address, "stride": self._stride, "rkey": self._region.rkey,
        }

    def connect(self, peer: dict[str, Any]) -> None:
        """Connect the queue pairs to those that the peer offered (INIT -> RTR -> RTS).

        Raises `UnsupportedError` if only one port is InfiniBand or `Rail.path` finds no path, `ConfigError` if the
        requested MTU is larger than that of a port, `OSError` if the device refuses.
        """
        if peer["link_layer"] != self.port["link_layer"]:
            raise UnsupportedError(f"{self.rail.name} is {self.port['link_layer']}, the peer's port "
                                   f"{peer['link_layer']}: these cannot connect; choose ports with -d")
        self.mtu = self.plan.mtu or min(self.port["active_mtu"], peer["mtu"])
        if self.mtu > min(self.port["active_mtu"], peer["mtu"]):
            raise ConfigError(f"-m {self.mtu}: the active MTU of {self.rail.name} is {self.port['active_mtu']}, of the "
                              f"peer's port {peer['mtu']}")
        self._peer = peer
        where = self.rail.path(peer["link_layer"], peer["lid"], peer["gid"], peer["pkey"])
        reads = min(self._max_reads, peer["reads"])
        for pair, number, psn in zip(self.pairs, peer["numbers"], peer["psns"]):
            pair.to_init(self.rail.port, remote_write=True, remote_read=self.plan.operation == "read",
                         pkey_index=self.rail.pkey_index)
            pair.to_rtr(number, psn, mtu=self.mtu, max_dest_rd_atomic=reads, traffic_class=self.plan.traffic_class,
                        sl=self.plan.service_level, **where)
            pair.to_rts(timeout=self.plan.ack_timeout, max_rd_atomic=reads)

    def place(self) -> dict[str, Any]:
        """Return a description of this side, once connected."""
        return described(self.rail) | {"mtu": self.mtu, "inline_nbytes": self._inline_nbytes}

    def prepare(self, nbytes: int, receives: bool) -> None:
        """Create the loop for messages of *nbytes*; post receives if the peer's operation consumes them."""
        plan = self.plan
        pairs = [(pair.handle if self._is_native else pair, self._region.address + 2 * i * self._stride,
                  self._region.address + (2 * i + 1) * self._stride, self._region.lkey,
                  self._peer["address"] + (2 * i + 1) * self._peer["stride"], self._peer["rkey"])
                 for i, pair in enumerate(self.pairs)]
        only_receives = plan.verb == "bw" and receives and not plan.both_ways
        options: dict[str, Any] = {
            "operation": plan.operation, "nbytes": nbytes, "depth": plan.depth, "receive_depth": plan.receive_depth,
            "receive_nbytes": self._stride, "receives": receives,
            "moderation": 1 if plan.operation == "read" and plan.verb == "lat" else plan.moderation_at(nbytes),
            "inlined": nbytes <= self._inline_nbytes and plan.operation != "read",
            "idle_s": 0.0 if plan.events else _IDLE_S if only_receives else None, "stall_s": plan.timeout_s,
        }
        naps: dict[str, Any] = {"nap_s": _NAP_S} if only_receives and not plan.events else {}
        is_first = self._loop is None
        self._loop = (native.VerbsLoop(self._send_cq.handle, self._recv_cq.handle, pairs, keep=self, **naps, **options)
                      if self._is_native else ProviderLoop(self._send_cq, self._recv_cq, pairs, **options))
        if is_first and receives:
            self._loop.post_receives()

    def bandwidth(self, n_send: int | None, n_receive: int | None, duration_s: float) -> tuple[Any, ...]:
        """Run `VerbsLoop.bandwidth` on the plan's cores; errors name the operation and both ports."""
        return self._explained(lambda: self._loop.bandwidth(n_send, n_receive, duration_s))

    def latency(self, n: int, first: bool) -> bytes:
        """Run `VerbsLoop.latency` on the plan's cores; errors as in `bandwidth`."""
        return self._explained(lambda: self._loop.latency(n, first))

    def _explained(self, run: Any) -> Any:
        try:
            with on_cores(self._cores):
                return run()
        except OSError as exc:
            what = f"{self.plan.operation} over {self.rail.name} to {self.pairs[0].peer}"
            if exc.errno == errno.ETIMEDOUT:
                raise StallError(f"{what}: nothing moved for {self.plan.timeout_s:g} s ({exc.strerror})") from exc
            if exc.errno == errno.EIO and self._loop.failure is not None:
                status, vendor_error, pair, is_receive = self._loop.failure
                raise PeerLostError(f"{what}: a {'receive' if is_receive else 'send'} of queue pair "
                                    f"{self.pairs[pair].number} completed with "
                                    f"{completions.explain(status, vendor_error)}") from exc
            if exc.errno == errno.EPROTO:
                raise BpsError(f"{what}: data with an unexpected length arrived; please report this") from exc
            raise

    @property
    def all_sent(self) -> int | None:
        """Any thread: number of messages sent in the run, once it is final."""
        return self._loop.all_sent

    def expect(self, n: int) -> None:
        """Any thread: set the number of messages that the peer sent."""
        self._loop.expect(n)

    def cancel(self) -> None:
        """Any thread: end the loop."""
        if self._loop is not None:
            self._loop.cancel()

    def counters(self) -> list[CounterSnapshot]:
        """Return fresh counters of the port, after the time for which the driver caches them."""
        time.sleep(min(self._snapshot().lifespan_s, _LONGEST_LIFESPAN_S))
        return [self._snapshot()]

    def _snapshot(self) -> CounterSnapshot:
        return snapshot(self.host.tree, self.rail.device, self.rail.port, netdev=self.rail.netdev,
                        kernel=self.host.kernel)

    def close(self) -> None:
        """Destroy everything in order. Idempotent."""
        self._loop = None
        self._undo.close()


def described(rail: Rail) -> dict[str, Any]:
    """Return *rail* as JSON data."""
    gid = rail.gid
    return {"device": rail.device, "port": rail.port, "gid_index": gid.index if gid else None,
            "gid": str(gid.address) if gid else None, "gid_version": gid.version if gid else None,
            "reason": rail.reason}
