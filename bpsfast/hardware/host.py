"""Host: facts about this machine, or about a recorded one, from its files and its kernel."""
from __future__ import annotations

from functools import cached_property

from . import gids, interfaces, numa
from .interfaces import Netdev
from .kernel import Kernel
from .rdma_devices import Port, RdmaDevice, rdma_devices
from .sysfs import Tree


class Host:
    """Facts about one machine, each read once, on first use. Make a new one to read again. Not thread-safe."""

    def __init__(self, tree: Tree | None = None, kernel: Kernel | None = None) -> None:
        self.tree = tree or Tree()
        self.kernel = kernel or Kernel()
        self._gids: dict[tuple[str, int], list[gids.Gid]] = {}

    @cached_property
    def devices(self) -> list[RdmaDevice]:
        """The RDMA devices."""
        return rdma_devices(self.tree)

    @cached_property
    def netdevs(self) -> dict[str, Netdev]:
        """The network interfaces by name."""
        addresses = self.kernel.addresses()
        # the folder also has files, such as bonding_masters
        return {name: interfaces.netdev(self.tree, name, tuple(addresses.get(name, ())))
                for name in self.tree.names(interfaces.FOLDER) if self.tree.exists(interfaces.FOLDER, name, "ifindex")}

    @cached_property
    def numa(self) -> dict[int, numa.NumaNode]:
        """The NUMA nodes by number."""
        return numa.nodes(self.tree)

    @cached_property
    def own_numa(self) -> frozenset[int]:
        """The NUMA nodes that this process may run on."""
        return numa.nodes_of(numa.allowed_cpus(self.tree), self.numa)

    @property
    def ports(self) -> list[tuple[RdmaDevice, Port]]:
        """Every port of every RDMA device."""
        return [(device, port) for device in self.devices for port in device.ports]

    def gids(self, device: str, port: Port) -> list[gids.Gid]:
        """Return the used rows of a port's GID table."""
        key = device, port.number
        if key not in self._gids:
            self._gids[key] = gids.table(self.tree, device, port.number, port.link_layer)
        return self._gids[key]

    def family(self, netdev: str) -> set[str]:
        """Return *netdev* and the interfaces on the same wire: its bond, and those below a VLAN or bond."""
        own = self.netdevs.get(netdev)
        if own is None:
            return {netdev}
        return {netdev, *own.lowers, *([own.master] if own.master else [])}
