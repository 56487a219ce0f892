"""Chooses the RDMA port and GID for a peer, with the reason for each port; finds the speed of the card of an address.

A port is *usable* if it is active, its device supports RDMA WRITE with immediate over reliable connections, and it has
a GID (RoCE) and the partition key that a setting asks for. Of the usable ones, `choose` prefers in this order:

1. the interface on the kernel's route to the peer, or one on the same wire (its bond, the parent of a VLAN);
2. a RoCE v2 address that passes routers;
3. the NUMA node that this process runs on;
4. the higher rate, then the lower number, so that equal machines choose equally.

All usable ports are used, or those that `rdma_devices` names, as in NCCL; without it not those whose GIDs pass no
router if others have better ones. The best one comes first. A port that is not on the kernel's route is used, too: the
addresses come from the control network, which is often a different network, and each rail may be a network of its own.
Which ports of two machines are the ends of one rail follows from their networks, else from their position among all
that could be used, in the order of their numbers; a port that is down keeps its position.
"""
from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..base.settings import Settings
from ..base.value_formats import RdmaDeviceList, parse_rdma_devices
from ..orchestration.errors import BpsError, ConfigError, UnsupportedError
from . import rdma_devices
from .host import Host
from .kernel import Address, Route
from .rdma_devices import Gid, Port, RdmaDevice
from .sysfs import natural

#: driver -> why it cannot be used, for RDMA devices without the reliable connections that are needed
_OTHER_DRIVERS = {
    "efa": "EFA has datagrams (SRD) and no reliable connections with RDMA WRITE with immediate",
    "erdma": "eRDMA makes connections by rdma_cm only",
    "siw": "iWARP has no RDMA WRITE with immediate",
}


_DEFAULTS = Settings()


@dataclass(frozen=True)
class Rail:
    """One port to use. `gid` is None on InfiniBand without a table; `reason`: why this port was chosen.

    `position`, `network` (of its address, "": unknown), `is_on_route` (of the kernel to the peer): by them rails pair
    up. `gbps`: the port's rate, 0 if unknown. `pkey`, `pkey_index`: the partition key (0: unknown) and its row. `grh`:
    whether packets have a global route header on InfiniBand, too.
    """

    device: str
    port: int
    gid: Gid | None
    netdev: str | None
    reason: str
    position: int = 0
    gbps: float = 0.0
    network: str = ""
    is_on_route: bool = False
    pkey: int = 0
    pkey_index: int = 0
    grh: bool = False

    @property
    def name(self) -> str:
        """The port as ``rdma link`` writes it: device/port."""
        return f"{self.device}/{self.port}"

    def path(self, link_layer: str, lid: int, gid: bytes, pkey: int = 0) -> dict[str, Any]:
        """Return the address of a peer's port of the same *link_layer* as keyword arguments of `QueuePair.to_rtr`.

        *pkey*: the partition key of the peer's port, 0 if unknown.

        RoCE uses GIDs. On InfiniBand both ports must be in one subnet, where LIDs suffice; a global route header takes
        40 bytes of each packet, so only `grh` (the setting rdma_grh) asks for it.

        Raises `UnsupportedError` if the ports are in different partitions or InfiniBand subnets, or `grh` lacks a GID.
        """
        if not rdma_devices.can_talk(self.pkey, pkey):
            raise UnsupportedError(
                f"{self.name} has the partition key {self.pkey:#06x}, the peer's port {pkey:#06x}: choose one "
                "partition for both with BPSFAST_RDMA_PKEY, of which at least one port is a full member")
        if link_layer != "Ethernet":
            ours = self.gid.value if self.gid else b""
            if ours and gid and ours[:8] != gid[:8]:
                raise UnsupportedError(
                    f"{self.name} is in the InfiniBand subnet {ours[:8].hex(':', 2)}, the peer's port in "
                    f"{gid[:8].hex(':', 2)}: LIDs do not lead from one subnet to another, and routers are not "
                    "supported; connect both ports to one subnet, or use tcp")
            if not self.grh:
                return {"lid": lid}
            if not ours or not gid:
                raise UnsupportedError(f"BPSFAST_RDMA_GRH is on, and {'the peer' if ours else self.name} has no GID")
        return {"lid": lid, "gid": gid, "gid_index": self.gid.index if self.gid else 0}


@dataclass(frozen=True)
class RailChoice:
    """The rails to use, the usable ports that were not chosen, and the reason for each rejected port."""

    rails: tuple[Rail, ...]
    spare: tuple[Rail, ...] = ()
    rejected: dict[str, str] = field(default_factory=dict)
    route: Route | None = None

    def require(self) -> tuple[Rail, ...]:
        """Return the rails.

        Raises `UnsupportedError` if there is none; the text has the reason for every port.
        """
        if not self.rails:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())
            raise UnsupportedError(f"no RDMA port can be used: {reasons or 'there is no RDMA device'}. "
                                   "`bpsfast doctor` says what to do about it")
        return self.rails


def choose(host: Host, settings: Settings = _DEFAULTS, peer: Address | None = None) -> RailChoice:
    """Choose the ports, GIDs and partition keys for *peer* (None: for any peer) by *settings*.

    Raises `ConfigError` if rdma_devices names a device that does not exist or a port outside of the partition
    rdma_pkey, or rdma_gid_index an empty row; the text lists those that exist.
    """
    allowed = parse_rdma_devices(settings.rdma_devices)
    _check_names(host, allowed, settings.rdma_devices)
    route = _route(host, peer)
    usable: list[tuple[_Rank, Rail]] = []
    rejected: dict[str, str] = {}
    places = sorted((natural(device.name), port.number) for device, port in host.ports
                    if allowed.admits(device.name, port.number) and incapable(device) is None)
    for device, port in host.ports:
        name = f"{device.name}/{port.number}"
        if not allowed.admits(device.name, port.number):
            rejected[name] = f"rdma_devices={settings.rdma_devices} leaves it out"
            continue
        table = host.gids(device.name, port)
        why_not = objection(device, port, table)
        if why_not:
            rejected[name] = why_not
            continue
        pkeys = host.pkeys(device.name, port.number)
        row = rdma_devices.pkey_index(pkeys, settings.rdma_pkey)
        if row is None:
            keys = ", ".join(f"{key:#06x}" for key in pkeys.values()) or "nothing"
            words = f"not in the partition {settings.rdma_pkey:#06x} (BPSFAST_RDMA_PKEY): its table has {keys}"
            if allowed.names_devices:
                raise ConfigError(f"{name} is {words}. The subnet manager gives a port its partitions")
            rejected[name] = words
            continue
        gid = _gid(table, settings.rdma_gid_index, name, route) if port.is_roce else rdma_devices.best_gid(table)
        position = places.index((natural(device.name), port.number))
        rank = _rank(host, device, port, gid, route)
        usable.append((rank,
                       Rail(device.name, port.number, gid, gid.netdev if gid and gid.netdev else port.netdev,
                            _reason(host, device, port, gid, route, allowed, settings.rdma_gid_index), position,
                            port.rate_gbps or 0.0, _network(host, port, gid),
                            route is not None and not rank.is_off_route, pkeys.get(row, 0), row, settings.rdma_grh)))
    ordered = [rail for _, rail in sorted(usable, key=lambda each: each[0])]
    if allowed.names_devices:
        return RailChoice(tuple(sorted(ordered, key=lambda rail: rail.position)), (), rejected, route)
    poor = {rail.name for rank, rail in usable if rank.has_poor_gid}
    used = [rail for rail in ordered if (rail.name in poor) == (ordered[0].name in poor)]
    return RailChoice(tuple(used), tuple(rail for rail in ordered if rail not in used), rejected, route)


def objection(device: RdmaDevice, port: Port, table: list[Gid]) -> str | None:
    """Return why a port cannot be used, None if it can."""
    never = incapable(device)
    if never:
        return never
    if not port.is_active:
        return f"the port is {port.state} ({port.phys_state}), not ACTIVE"
    if port.is_roce and not table:
        return f"its GID table is empty (is {port.netdev or 'its interface'} up?)"
    if not port.is_roce and not port.lid:
        return "the port has no LID: no subnet manager has configured it"
    return None


def incapable(device: RdmaDevice) -> str | None:
    """Return why a device can never be used, None if it can."""
    if device.driver in _OTHER_DRIVERS:
        return _OTHER_DRIVERS[device.driver]
    if device.kind == "RNIC":
        return "it runs iWARP, which has no RDMA WRITE with immediate"
    if device.kind != "CA":
        return f"it is of the kernel's kind {device.kind!r}, not a channel adapter with reliable connections"
    return None


def _check_names(host: Host, allowed: RdmaDeviceList, devices: str) -> None:
    ports = [(device.name, port.number) for device, port in host.ports]
    unknown = allowed.unmatched(ports)
    if unknown:
        there = ", ".join(f"{name}:{number}" for name, number in ports) or "no RDMA device"
        raise ConfigError(f"rdma_devices={devices!r}: {', '.join(map(str, unknown))} matches nothing here; "
                          f"there is {there}")


def _gid(table: list[Gid], index: int, port: str, route: Route | None) -> Gid | None:
    if index < 0:
        return rdma_devices.best_gid(table, route)
    for row in table:
        if row.index == index:
            return row
    rows = ", ".join(f"{row.index} ({row.version} {row.address})" for row in table)
    raise ConfigError(f"rdma_gid_index={index} is an empty row of the GID table of {port}; there is {rows}")


def _route(host: Host, peer: Address | None) -> Route | None:
    if peer is None:
        return None
    try:
        route = host.kernel.route(peer)
    except OSError:
        return None  # the peer can still be in the InfiniBand subnet
    if not route.local:
        return route
    # a local address: the interface that has it, instead of the kernel's loopback
    owner = next((netdev.name for netdev in host.netdevs.values() if peer in netdev.ips), route.netdev)
    return Route(peer, owner, peer, None, local=True)


def on_route(host: Host, netdev: str | None, route: Route) -> bool:
    """Whether *netdev* is the route's interface or on the same wire."""
    return netdev is not None and bool(host.family(netdev) & host.family(route.netdev))


def _network(host: Host, port: Port, gid: Gid | None) -> str:
    """Return the IP network of a RoCE port's address, or the subnet prefix of an InfiniBand port."""
    if gid is None:
        return ""
    if not port.is_roce:
        return gid.value[:8].hex(":", 2)
    return next((str(interface.network) for netdev in host.netdevs.values() for interface in netdev.addresses
                 if interface.ip == gid.address and not gid.is_link_local), "")


class _Rank(NamedTuple):
    """What makes a port worse than others, in the order of importance."""

    is_off_route: bool
    has_poor_gid: bool
    is_far: bool
    minus_gbps: float
    device: tuple
    port: int


def _rank(host: Host, device: RdmaDevice, port: Port, gid: Gid | None, route: Route | None) -> _Rank:
    is_off_route = route is not None and not on_route(host, gid.netdev if gid and gid.netdev else port.netdev, route)
    has_poor_gid = port.is_roce and (gid is None or gid.version != "v2" or gid.is_link_local)
    is_far = device.numa_node is not None and device.numa_node not in host.own_numa
    return _Rank(is_off_route, has_poor_gid, is_far, -(port.rate_gbps or 0.0), natural(device.name), port.number)


def _reason(host: Host, device: RdmaDevice, port: Port, gid: Gid | None, route: Route | None,
            allowed: RdmaDeviceList, gid_index: int) -> str:
    words = []
    netdev = gid.netdev if gid and gid.netdev else port.netdev
    if allowed.names_devices:
        words.append(f"named by rdma_devices={allowed}")
    if route is not None:
        words.append(f"{netdev} is on the route to {route.destination}" if on_route(host, netdev, route)
                     else f"the route to {route.destination} leaves by {route.netdev}, not by it")
    if gid is not None and port.is_roce:
        words.append(f"GID {gid.index} {'by rdma_gid_index' if gid_index >= 0 else 'is'} RoCE {gid.version} "
                     f"{gid.address}{' (link-local: same wire only)' if gid.is_link_local else ''}")
    if device.numa_node is not None and len(host.numa) > 1:
        near = "this process's" if device.numa_node in host.own_numa else "not this process's"
        words.append(f"NUMA node {device.numa_node}, {near}")
    if port.rate_gbps:
        words.append(f"{port.rate_gbps:g} Gb/s")
    return ", ".join(words)


def peer_address(host: Host, name: str) -> Address:
    """Return the address of a host name, or of an address as text; raises OSError if it has none."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return host.kernel.resolve(name)[0]


#: Emulated cards: they report no speed, or one that is unrelated to what the machine may use.
_VIRTUAL_DRIVERS = frozenset({"virtio_net", "vmxnet3", "hv_netvsc", "vif", "xen_netfront", "tun", "veth"})


def interface_gbps(host: Host, address: str) -> tuple[float, str]:
    """Return the rate in Gbit/s of the interface that has *address*, and where the number comes from.

    0 if it is not known: loopback, veth, emulated cards, a cable that is not plugged in.
    """
    wanted = ipaddress.ip_address(address)
    owner = next((netdev.name for netdev in host.netdevs.values()
                  if any(interface.ip == wanted for interface in netdev.addresses)), None)
    if owner is None:
        return 0.0, f"no interface has the address {address}"
    return _told(host, owner, frozenset())


def rails_gbps(host: Host, address: str, settings: Settings = _DEFAULTS) -> tuple[float, str]:
    """Return the same for all RDMA ports together that would be used for *address* by *settings*; 0 without any."""
    try:
        rails = choose(host, settings, ipaddress.ip_address(address)).rails
    except BpsError as exc:  # reported later, if RDMA is needed
        return 0.0, str(exc)
    ports = {(device.name, port.number): (device, port) for device, port in host.ports}
    total, known = 0.0, []
    for rail in rails:
        device, port = ports[rail.device, rail.port]
        # a software device is as fast as the interface below it
        gbps = port.rate_gbps or 0.0 if device.pcie or port.netdev is None else _told(host, port.netdev, frozenset())[0]
        if gbps:
            known.append(rail.name)
        total += gbps
    if rails and not known:
        return 0.0, f"{', '.join(rail.name for rail in rails)}: no card whose rate is known"
    return total, ", ".join(known) + " by RDMA" if rails else "there is no RDMA port to use"


def _told(host: Host, name: str, seen: frozenset[str]) -> tuple[float, str]:
    netdev = host.netdevs.get(name)
    if netdev is None or name in seen:
        return 0.0, f"nothing is known of {name}"
    if netdev.driver in _VIRTUAL_DRIVERS:
        return 0.0, f"{name} is a virtual card ({netdev.driver})"
    if netdev.is_card or host.tree.exists("sys/class/net", name, "bonding"):
        if netdev.speed_mbps is None:
            return 0.0, f"{name} tells no speed"
        return netdev.speed_mbps / 1e3, f"{name} tells it"
    # a VLAN or a bridge is as fast as the single card below it
    below = [told for lower in netdev.lowers if (told := _told(host, lower, seen | {name}))[0] > 0]
    if len(below) == 1:
        return below[0]
    return 0.0, f"{name} is no card" if not below else f"{name} stands on {len(below)} cards"
