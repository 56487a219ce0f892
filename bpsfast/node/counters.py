"""What a node has counted, as one flat table of integers."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime import NodeRuntime


def told(runtime: NodeRuntime, n_control: int) -> dict[str, int]:
    """Return all counters of a node.

    ``engine_*``, ``dispatch_*``, ``wire_N_*`` (per peer over tcp or rdma), ``rank_N_*`` are what those count;
    ``wire_N_replaced`` how often another link has taken the place of one that ended; ``wire_N_writes_damaged`` how many
    writes did not come as they were sent, where that is seen (settings checksum and encryption);
    ``control_messages`` are the messages to and from scheduler, ranks and peers, heartbeats apart; ``registrations``
    the segments ever made; ``rdma_*``, where any peer is reached by it: what its rails count; ``memory_*`` bytes:
    segments by kind, resident memory outside of segments; ``transport_N`` 1 = shm, 2 = tcp, 3 = rdma.
    """
    found = {}
    for group, counters in runtime.counters().items():
        found.update({f"{group}_{name}": value for name, value in counters.items()})
    found["control_messages"] = n_control
    found["registrations"] = runtime.regions.n_segments
    for kind, nbytes in runtime.regions.nbytes_by_kind().items():
        found[f"memory_{kind}"] = nbytes
    found["memory_segments"] = runtime.regions.nbytes
    found["memory_outside_segments"] = resident_outside_segments()
    for index, link in runtime.links.items():
        found[f"transport_{index}"] = {"shm": 1, "tcp": 2, "rdma": 3}[link.kind]
    return found


def resident_outside_segments() -> int:
    """Return the resident bytes of this process that are not shared memory (memfds count as shared memory)."""
    nbytes = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            nbytes += int(value.split()[0]) * 1024
    return nbytes
