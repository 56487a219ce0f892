"""What `perf` has to measure so that it moves data as a job with these settings would.

A job has credit_bytes on the way to one peer, in partitions, spread over the queue pairs of all rails; more queue pairs
than partitions on the way stay idle. A measurement does the same with messages of the size of a partition.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...base.value_formats import parse_rdma_devices
from ...node.transport.rdma.handshake import ACK_TIMEOUT
from ...orchestration.errors import ConfigError
from ..perf.perf_plan import Plan
from .capabilities import HostCapabilities, RailCapabilities

ONE_WAY, TWO_WAY, INCAST, LATENCY = "one-way", "two-way", "incast", "latency"
#: What is too small for anything but its latency to matter: an empty contribution, a few scalars.
LATENCY_NBYTES = 64
_TURNS = 200
_RECEIVES = 512
#: The settings that are tuned; each is read by the transport.
NAMES = ("partition_bytes", "credit_bytes", "rdma_devices", "rdma_queue_pairs", "rdma_queue_depth", "rdma_signal_every",
         "rdma_inline_bytes", "rdma_mtu", "rdma_traffic_class", "rdma_service_level", "rdma_relaxed_ordering",
         "huge_pages", "rdma_cores")


def rails_of(side: HostCapabilities, devices: str) -> list[RailCapabilities]:
    """Return the rails that *side* would use with the setting rdma_devices; the order pairs them up with the peer's.

    Raises
    ------
    ConfigError
        If the setting names none of them.
    """
    if not devices:
        return list(side.require()[:side.n_used])
    wanted = parse_rdma_devices(devices)
    found = [rail for rail in side.require() if wanted.admits(rail.device, rail.port)]
    if not found:
        raise ConfigError(f"rdma_devices={devices!r} names no usable port of {side.host}")
    return found


def plan_of(config: dict[str, Any], load: str, rails: Sequence[RailCapabilities], n_rails: int, duration_s: float,
            timeout_s: float) -> Plan:
    """Return the plan for one of *n_rails* pairs of rails between two machines.

    All that are measured at once have the same plan, so what limits any of *rails*, all that take part, limits it.
    """
    mtu = min(rail.mtu for rail in rails)
    most = min(rail.max_qp_wr for rail in rails)
    shared: dict[str, Any] = {
        "timeout_s": timeout_s, "ack_timeout": ACK_TIMEOUT, "mtu": min(config["rdma_mtu"] or mtu, mtu),
        "traffic_class": config["rdma_traffic_class"], "service_level": config["rdma_service_level"],
        "relaxed_ordering": config["rdma_relaxed_ordering"], "huge_pages": config["huge_pages"] == "auto",
        "cores": config["rdma_cores"], "inline_nbytes": config["rdma_inline_bytes"],
        "receive_depth": min(_RECEIVES, most),
    }
    if load == LATENCY:
        return Plan(verb="lat", sizes=(LATENCY_NBYTES,), iterations=_TURNS, depth=min(config["rdma_queue_depth"], most),
                    **shared)
    nbytes = config["partition_bytes"]
    on_the_way = max(1, config["credit_bytes"] // nbytes // n_rails)
    pairs = min(config["rdma_queue_pairs"], on_the_way)
    depth = min(config["rdma_queue_depth"], most, max(1, on_the_way // pairs))
    return Plan(verb="bw", sizes=(nbytes,), duration_s=duration_s, pairs=pairs, depth=depth,
                moderation=min(config["rdma_signal_every"], depth), both_ways=load == TWO_WAY,
                reversed=load == INCAST, **shared)
