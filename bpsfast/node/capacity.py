"""What a node says of itself when it joins: how fast its NIC is, how much of it it may take, how fast it sums."""
from __future__ import annotations

import logging
from typing import NamedTuple

from ..base.settings import Settings
from ..hardware import rdma_route
from ..hardware.host import Host
from . import copy_rate

log = logging.getLogger("bpsfast.node")

_BYTES = 1e9 / 8  # of one Gbit


class NodeCapacity(NamedTuple):
    """Rates in bytes/s; 0: not known, not limited, no matter. `probes`: the first is to be measured with others.

    `copy_rate_bytes`: of all summing threads together.
    """

    nic_rate_bytes: float
    nic_limit_bytes: float
    sum_rate_bytes: float
    probes: bool = False
    copy_rate_bytes: float = 0.0


def of(settings: Settings, address: str) -> NodeCapacity:
    """Return the strength of this machine, whose peers connect to *address*.

    Sums are measured, for a fraction of a second, where the node has only some CPUs of its machine; else it is taken
    to sum faster than its NIC brings anything (three cores keep up with 100 Gbit/s).
    """
    host = Host()
    by_rdma, ports = 0.0, ""
    if settings.transport in ("auto", "rdma") and not settings.nic_limit:
        by_rdma, ports = rdma_route.rails_gbps(host, address, settings.rdma_devices, settings.rdma_gid_index)
    if settings.nic_rate:
        gbps, source = settings.nic_rate, "set"
    else:
        gbps, source = (by_rdma, ports) if by_rdma else rdma_route.interface_gbps(host, address)
    log.info("NIC behind %s: %s (%s)", address, f"{gbps:g} Gbit/s" if gbps else "rate not known", source)
    sum_rate = settings.sum_rate * _BYTES
    if settings.cores and not sum_rate:
        from . import sum_rate as throughput  # compiles a kernel

        sum_rate = throughput.measure(settings.engine_threads or settings.cores, by_tcp=not by_rdma)
        log.info("%d CPUs %s %.3g Gbit/s", settings.cores, "sum" if by_rdma else "receive, sum and send on",
                 sum_rate / _BYTES)
    probes = settings.nic_probe and not gbps and not settings.nic_limit
    return NodeCapacity(gbps * _BYTES, settings.nic_limit * _BYTES, sum_rate, probes,
                    copy_rate.measure(copy_rate.n_threads(settings)))
