"""What one machine tells another about its RDMA ports, so that both ends can be compared."""
from __future__ import annotations

import ipaddress

import msgspec

from ...hardware.gids import Gid
from ...hardware.host import Host
from ...hardware.netlink import Address
from ...hardware.rdma_devices import roce_mtu
from ...hardware.rdma_route import RailChoice


class PeerPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port that could be used. `gid` is the row that would be (text of the address), with its version.

    `mtu` is the interface's in bytes, 0 if unknown; `path_mtu` what the port would take for its packets, 0 if unknown.
    """

    name: str
    link_layer: str
    driver: str
    netdev: str = ""
    mtu: int = 0
    path_mtu: int = 0
    rate_gbps: float = 0.0
    lid: int = 0
    gid: str = ""
    gid_version: str = ""

    @property
    def address(self) -> Address | None:
        """The address that reaches the port, None on InfiniBand."""
        return ipaddress.ip_address(self.gid) if self.gid and self.gid_version != "IB" else None


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: the ports that would be used first, then those that could be; `rejected`, with reasons, the others.

    `transport`: its setting. `reached`: what came of its own connection to the asking machine ("open" or a reason; ""
    if it was not asked to try).
    """

    version: str
    hostname: str
    transport: str
    used: list[PeerPort] = []
    spare: list[PeerPort] = []
    rejected: dict[str, str] = {}
    reached: str = ""


def describe(host: Host, choice: RailChoice, path_mtus: dict[str, int]) -> tuple[list[PeerPort], list[PeerPort]]:
    """Return the ports that *choice* uses and those it spares; *path_mtus* by port, as libibverbs says."""
    ports = {f"{device.name}/{port.number}": (device, port) for device, port in host.ports}

    def told(name: str, gid: Gid | None, netdev: str | None) -> PeerPort:
        device, port = ports[name]
        card = host.netdevs.get(netdev or "")
        mtu = card.mtu if card else 0
        return PeerPort(
            name=name, link_layer=port.link_layer, driver=device.driver, netdev=netdev or "", mtu=mtu,
            path_mtu=path_mtus.get(name) or (roce_mtu(mtu) if port.is_roce and mtu else 0),
            rate_gbps=port.rate_gbps or 0.0, lid=port.lid,
            gid=str(gid.address) if gid else "", gid_version=gid.version if gid else "")

    return ([told(rail.name, rail.gid, rail.netdev) for rail in choice.rails],
            [told(rail.name, rail.gid, rail.netdev) for rail in choice.spare])
