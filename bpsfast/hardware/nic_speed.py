"""How fast the network cards are that a node's bytes go through, as far as the kernel knows."""
from __future__ import annotations

import ipaddress

from ..orchestration.errors import BpsError
from . import rdma_route
from .host import Host

#: Cards that a hypervisor plays: they tell no speed, or one that has nothing to do with what the machine may use.
_VIRTUAL_DRIVERS = frozenset({"virtio_net", "vmxnet3", "hv_netvsc", "vif", "xen_netfront", "tun", "veth"})


def interface_gbps(host: Host, address: str) -> tuple[float, str]:
    """Return the rate in Gbit/s of the interface that has *address*, and in words where that comes from.

    0 where nobody knows: loopback, veth and the like, cards played by a hypervisor, a cable that is not plugged in.
    """
    wanted = ipaddress.ip_address(address)
    owner = next((netdev.name for netdev in host.netdevs.values()
                  if any(interface.ip == wanted for interface in netdev.addresses)), None)
    if owner is None:
        return 0.0, f"no interface has the address {address}"
    return _told(host, owner, frozenset())


def rails_gbps(host: Host, address: str, devices: str = "", gid_index: int = -1) -> tuple[float, str]:
    """Return the same for the RDMA ports by which peers of *address* would be reached, together; 0 if there is none.

    *devices*, *gid_index*: the settings rdma_devices and rdma_gid_index.
    """
    try:
        rails = rdma_route.choose(host, devices=devices, gid_index=gid_index, peer=ipaddress.ip_address(address)).rails
    except BpsError as exc:  # whoever wants RDMA says so in time
        return 0.0, str(exc)
    ports = {(device.name, port.number): (device, port) for device, port in host.ports}
    total = 0.0
    for rail in rails:
        device, port = ports[rail.device, rail.port]
        # a device in software is as fast as the interface below it
        gbps = port.rate_gbps or 0.0 if device.pcie or port.netdev is None else _told(host, port.netdev, frozenset())[0]
        if not gbps:
            return 0.0, f"{rail.name} is no card whose rate is known"
        total += gbps
    return total, ", ".join(rail.name for rail in rails) + " by RDMA" if rails else "there is no RDMA port to use"


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
    # a VLAN or a bridge is as fast as the one card it stands on
    below = [told for lower in netdev.lowers if (told := _told(host, lower, seen | {name}))[0] > 0]
    if len(below) == 1:
        return below[0]
    return 0.0, f"{name} is no card" if not below else f"{name} stands on {len(below)} cards"
