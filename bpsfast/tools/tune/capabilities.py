"""What one side has for RDMA: its rails with their limits, its NUMA nodes and cores, its huge pages."""
from __future__ import annotations

import os
from typing import Any

import msgspec

from ...base.settings import Settings
from ...hardware import numa
from ...hardware.host import Host
from ...hardware.verbs import provider
from ...orchestration.errors import UnsupportedError
from ...pyx.pages import huge_page_nbytes
from ..perf import ping


class RailCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """One usable port: `mtu` is the active path MTU in bytes, `near` the allowed cores of its NUMA node."""

    device: str
    port: int
    driver: str
    link_layer: str
    reason: str
    mtu: int
    max_qp: int
    max_qp_wr: int
    numa_node: int | None
    near: tuple[int, ...]

    @property
    def name(self) -> str:
        """device:port, as the setting rdma_devices writes it."""
        return f"{self.device}:{self.port}"


class HostCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. `rails`: best first towards the other side, those in use by its settings before the others."""

    host: str
    rails: tuple[RailCapabilities, ...]
    rejected: dict[str, str]
    n_used: int
    n_numa: int
    cores: tuple[int, ...]
    huge_page_nbytes: int

    def require(self) -> tuple[RailCapabilities, ...]:
        """Return the rails; raises `UnsupportedError`, which says of every port why not, if there are none."""
        if not self.rails:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())
            raise UnsupportedError(f"{self.host}: no RDMA port can be used: {reasons or 'there is no RDMA device'}. "
                                   "`bpsfast doctor` there says what to do about it")
        return self.rails


def gather(host: Host, loaded: Settings, peer_host: str) -> HostCapabilities:
    """Return the facts of this machine, *host*, seen towards *peer_host*.

    Raises
    ------
    ConfigError, OSError
        The settings name what is not there; libibverbs or a device cannot be opened.
    """
    rails, rejected = ping.rails(host, loaded, peer_host)
    allowed = numa.allowed_cpus(host.tree)
    return HostCapabilities(
        host=os.uname().nodename, rails=tuple(_rail(host, loaded, rail, allowed) for rail in rails), rejected=rejected,
        n_used=len(rails) if loaded.rdma_devices else min(1, len(rails)), n_numa=len(host.numa),
        cores=tuple(sorted(allowed)), huge_page_nbytes=huge_page_nbytes(),
    )


def _rail(host: Host, loaded: Settings, rail: Any, allowed: frozenset[int]) -> RailCapabilities:
    device = next(each for each in host.devices if each.name == rail.device)
    with provider(loaded.verbs).Device(rail.device) as opened:
        limits, port = opened.attributes, opened.port(rail.port)
    node = device.numa_node
    near = host.numa[node].cpus & allowed if node in host.numa else allowed
    return RailCapabilities(device=rail.device, port=rail.port, driver=device.driver, link_layer=port["link_layer"],
                     reason=rail.reason, mtu=port["active_mtu"], max_qp=limits["max_qp"],
                     max_qp_wr=limits["max_qp_wr"], numa_node=node, near=tuple(sorted(near)))
