"""Decides which partitions network cards read and write directly in a rank's device memory (GPUDirect).

A rank shares memory of its device, which is registered with all cards in use; the node has addresses for it (`Shadow`)
but cannot read it. So a partition can be sent from there if this node need not read it: another node, reached by RDMA,
sums it, and one rank of this node has all of its input. All others pass through host memory.
"""
from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping

from ..base.settings import Settings
from ..hardware.topology import discovery
from ..hardware.topology.copies import direct_refusal
from ..orchestration.errors import BpsError, CapacityError, ConfigError, UnsupportedError
from ..orchestration.messages import PartPlan, ShareDevice, UnitPlan
from ..orchestration.placement.partition import ROWS
from ..pyx.pages import Shadow
from .regions import Chunk, Regions
from .transport import Link
from .transport.rdma import Rails, RdmaLink

log = logging.getLogger("bpsfast.node")


class GpuDirect:
    """The device memory that a rank of this node shares, and the partitions that use it. For the control loop's thread.

    *links* by node, which may change.
    """

    def __init__(self, settings: Settings, regions: Regions, rails: Rails, links: Mapping[int, Link]) -> None:
        self._inline_nbytes = settings.rdma_inline_bytes
        self._regions = regions
        self._rails = rails
        self._links = links
        self._names: set[str] = set()
        self._owner: int | None = None  # the local rank whose device it is
        self._reasons: set[str] = set()  # that were logged
        self._n_parts: Counter[bool] = Counter()

    @property
    def is_used(self) -> bool:
        """Whether a rank has shared memory."""
        return self._owner is not None

    def expect(self, names: Iterable[str]) -> None:
        """Record that the rank that shares memory is about to declare *names*, which lie on its device."""
        self._names.update(names)

    def forget(self, names: Iterable[str]) -> None:
        """Record that *names* are retired."""
        self._names.difference_update(names)

    def register(self, local_rank: int, message: ShareDevice, fd: int) -> Chunk:
        """Register the memory behind *fd*, which this object closes in any case, and return its chunk.

        Raises `ConfigError`, `UnsupportedError` or `CapacityError` with the reason; nothing was registered.
        """
        shadow = None
        try:
            self._require(local_rank, message)
            shadow = Shadow(fd, message.nbytes, maps=not message.gpu)
            chunk = self._regions.add_device_memory(shadow, message.result_nbytes)
        except (BpsError, OSError, ValueError) as exc:
            if shadow is not None:
                shadow.close()
            else:
                os.close(fd)
            if isinstance(exc, CapacityError) and message.gpu:
                raise UnsupportedError(f"BPSFAST_GPU_DIRECT: {exc}; or set it to off: sums then go through memory of "
                                       "the host") from exc
            if isinstance(exc, BpsError):
                raise
            raise CapacityError(f"BPSFAST_GPU_DIRECT: {message.nbytes} bytes of a device cannot be had: {exc}") from exc
        self._owner = local_rank
        return chunk

    def _require(self, local_rank: int, message: ShareDevice) -> None:
        if self._owner not in (None, local_rank):
            raise ConfigError(f"BPSFAST_GPU_DIRECT: local ranks {self._owner} and {local_rank} both want to send from "
                              "their GPUs; one GPU of a machine can: the one with the sum of all (islands, one root)")
        if not self._rails.used:
            raise UnsupportedError("BPSFAST_GPU_DIRECT is on, but this node reaches no other one by RDMA (its log says "
                                   "why): give the machines RDMA cards, or set it to off")
        if message.gpu:
            reason = direct_refusal(discovery.discover(None), message.gpu, self._rails.devices)
            if reason:
                raise UnsupportedError(f"BPSFAST_GPU_DIRECT is on, but {reason}: name cards below its switch in "
                                       "BPSFAST_RDMA_DEVICES, or set it to off: sums then go through memory of the "
                                       "host")

    def why_staged(self, unit: UnitPlan, part: PartPlan, me: int, n_local: int) -> str | None:
        """Return why *part*, pushed by *n_local* ranks of node *me*, passes through host memory.

        "": it does not; None: it lies in host memory anyway.
        """
        if not self._names or not n_local or any(member.name not in self._names for member in unit.members):
            return None
        if part.owner == me:
            return "this node sums it"
        link = self._links.get(part.owner)
        if not isinstance(link, RdmaLink) or link.fenced:
            return f"node {part.owner}, which sums it, is not reached by RDMA"
        if unit.codec is not None or unit.op == ROWS or unit.store is not None:
            return "it is compressed, made of rows or kept by its owner"
        if n_local > 1 and not unit.islands:
            return "several ranks of this machine push it, and not as an island"
        if part.nbytes <= self._inline_nbytes:
            return f"it has no more than rdma_inline_bytes={self._inline_nbytes} bytes, which the CPU copies"
        return ""

    def count(self, unit: UnitPlan, reason: str) -> None:
        """Count one partition of *unit*; log each *reason* why one is staged once, and once that one is not."""
        self._n_parts[not reason] += 1
        if reason not in self._reasons:
            self._reasons.add(reason)
            if reason:
                log.info("a partition of %r passes through host memory: %s (others may, too)",
                         unit.members[0].name, reason)
            else:
                log.info("partitions go directly between a GPU and %s (GPUDirect, unproven: measure it)",
                         ", ".join(self._rails.devices))

    def reaches(self, link: Link) -> bool:
        """Whether anything bound to *link* lies on a device, where only RDMA can write or read."""
        return isinstance(link, RdmaLink) and any(self.holds(even) for even, *_ in tuple(link.bound.values()))

    def holds(self, address: int) -> bool:
        """Whether *address* represents memory of a device."""
        return any(chunk.segment.address <= address < chunk.segment.address + chunk.segment.nbytes
                   for chunk in self._regions.direct.chunks)

    def counters(self) -> dict[str, int]:
        """Return how many partitions used GPUDirect, how many of the same tensors did not, and the bytes shared."""
        return {"partitions": self._n_parts[True], "staged_partitions": self._n_parts[False],
                "nbytes": sum(chunk.segment.nbytes for chunk in self._regions.direct.chunks)}
