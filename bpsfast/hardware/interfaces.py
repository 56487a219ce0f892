"""Network interfaces, and the PCIe link of the card behind each."""
from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from .kernel import Interface
from .sysfs import Tree

FOLDER = "sys/class/net"
#: largest speed (GT/s per lane) -> share of payload, by line code (PCIe 1-2: 8b/10b, 3-5: 128b/130b, 6: flits of 242
#: in 256 bytes)
_LINE_CODES = ((5.0, 8 / 10), (32.0, 128 / 130), (float("inf"), 242 / 256))


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link: its present speed (GT/s per lane) and width (lanes), and the largest that the card supports."""

    address: str
    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def gbps(self) -> float:
        """Gbit/s per direction at the present speed and width, before the overhead of PCIe packets (about 10-20 %)."""
        return _gbps(self.speed, self.width)

    @property
    def max_gbps(self) -> float:
        """Gbit/s per direction at the largest speed and width of the card."""
        return _gbps(self.max_speed, self.max_width)

    @property
    def degraded(self) -> bool:
        """Whether the link runs below the card's largest speed or width."""
        return self.width < self.max_width or self.speed < self.max_speed

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.width}"


@dataclass(frozen=True)
class Netdev:
    """One network interface. A field is None if the kernel does not say."""

    name: str
    mtu: int
    state: str
    speed_mbps: int | None = None
    kind: int = 1
    driver: str | None = None
    numa_node: int | None = None
    #: the bond or bridge that this interface is part of
    master: str | None = None
    #: the interfaces below a VLAN, macvlan or bond
    lowers: tuple[str, ...] = ()
    n_rx_queues: int = 0
    pcie: PcieLink | None = None
    addresses: tuple[Interface, ...] = ()

    @property
    def ips(self) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, ...]:
        """The addresses that are neither loopback nor link-local."""
        return tuple(each.ip for each in self.addresses if not each.ip.is_loopback and not each.ip.is_link_local)

    @property
    def is_card(self) -> bool:
        """Whether a device, real or emulated, is behind the interface."""
        return self.driver is not None


def netdev(tree: Tree, name: str, addresses: tuple[Interface, ...] = ()) -> Netdev:
    """Return the interface *name*."""
    speed = tree.number(FOLDER, name, "speed")
    return Netdev(
        name=name,
        mtu=tree.number(FOLDER, name, "mtu") or 0,
        state=tree.text(FOLDER, name, "operstate") or "unknown",
        speed_mbps=speed if speed is not None and speed > 0 else None,
        kind=tree.number(FOLDER, name, "type") or 0,
        driver=tree.target(FOLDER, name, "device", "driver"),
        numa_node=tree.numa_node(FOLDER, name, "device"),
        master=tree.target(FOLDER, name, "master"),
        lowers=tuple(entry[len("lower_"):] for entry in tree.names(FOLDER, name) if entry.startswith("lower_")),
        n_rx_queues=sum(entry.startswith("rx-") for entry in tree.names(FOLDER, name, "queues")),
        pcie=pcie_link(tree, f"{FOLDER}/{name}/device"),
        addresses=addresses,
    )


def pcie_link(tree: Tree, device: str) -> PcieLink | None:
    """Return the PCIe link of the card that the symbolic link *device* points to, None if it is not on PCIe."""
    numbers = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        word = (tree.text(device, name) or "").split(" ")[0]  # "16.0 GT/s PCIe"; "Unknown" on virtual cards
        try:
            numbers.append(float(word))
        except ValueError:
            return None
    speed, width, max_speed, max_width = numbers
    # virtual functions and virtual machines report 0 or 255 lanes
    if not 0 < width < 255 or not speed:
        return None
    return PcieLink(tree.target(device) or "", speed, int(width), max_speed, int(max_width))


def _gbps(speed: float, width: int) -> float:
    share = next(share for limit, share in _LINE_CODES if speed <= limit)
    return speed * width * share
