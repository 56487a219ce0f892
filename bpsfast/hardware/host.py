"""Hardware facts of this machine, or of a recorded one: its RDMA devices, network interfaces and NUMA nodes.

They come from sysfs, procfs and the kernel. A recorded machine is a copy of its ``/sys`` and ``/proc``, and the
kernel's answers in ``answers.json`` beside them, of which every field of `KernelAnswers` may be missing: unknown or
empty. A user's machine can so be examined elsewhere (``--root DIR``), and tests have machines that are not at hand.
"""
from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from ..orchestration.errors import ConfigError
from . import interfaces, numa, rdma_devices as gids
from .interfaces import Netdev
from .kernel import Address, Interface, Kernel, PingResult, Route
from .rdma_devices import Port, RdmaDevice, rdma_devices
from .sysfs import Tree


class Host:
    """Facts about one machine, each read once, on first use. Make a new one to read again. Not thread-safe."""

    def __init__(self, tree: Tree | None = None, kernel: Kernel | None = None) -> None:
        self.tree = tree or Tree()
        self.kernel = kernel or Kernel()
        self._gids: dict[tuple[str, int], list[gids.Gid]] = {}
        self._pkeys: dict[tuple[str, int], dict[int, int]] = {}

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
            self._gids[key] = gids.gid_table(self.tree, device, port.number, port.link_layer)
        return self._gids[key]

    def pkeys(self, device: str, port: int) -> dict[int, int]:
        """Return the used rows of a port's table of partition keys, by index."""
        key = device, port
        if key not in self._pkeys:
            self._pkeys[key] = gids.pkey_table(self.tree, device, port)
        return self._pkeys[key]

    def family(self, netdev: str) -> set[str]:
        """Return *netdev* and the interfaces on the same wire: its bond, and those below a VLAN or bond."""
        own = self.netdevs.get(netdev)
        if own is None:
            return {netdev}
        return {netdev, *own.lowers, *([own.master] if own.master else [])}


ANSWERS = "answers.json"


class RecordedRoute(msgspec.Struct, forbid_unknown_fields=True):
    """A `kernel.Route` as text, as a recorded machine has it."""

    netdev: str
    source: str | None = None
    gateway: str | None = None
    local: bool = False


class KernelAnswers(msgspec.Struct, forbid_unknown_fields=True):
    """The answers of `Kernel`. Addresses are text; addresses of interfaces have their network ("10.1.0.1/24").

    `paths`: the largest packet (bytes) that reaches an address unfragmented; other addresses do not answer. `links`:
    the pairs "interface>address" that answer, if not every interface reaches every address. `verbs` and `peer`: what
    the doctor found with libibverbs and at its peer, as in its JSON. `nvml`: NVML's answer about GPUs
    (`bpsfast.hardware.topology.nvml.Answer`).
    """

    environ: dict[str, str] = {}
    addresses: dict[str, list[str]] = {}
    routes: dict[str, RecordedRoute] = {}
    names: dict[str, list[str]] = {}
    shm_nbytes: int | None = None
    statistics: dict[str, dict[str, int]] = {}
    pause_priorities: dict[str, list[int]] = {}
    paths: dict[str, int] = {}
    links: list[str] | None = None
    verbs: Any = None
    peer: Any = None
    nvml: Any = None


class RecordedKernel(Kernel):
    """A `Kernel` that answers from `answers`, without waiting. Thread-safe."""

    def __init__(self, answers: KernelAnswers) -> None:
        self.answers = answers

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment's variables, as recorded."""
        return self.answers.environ

    def addresses(self) -> dict[str, list[Interface]]:
        return {netdev: sorted(map(ipaddress.ip_interface, texts), key=lambda interface: interface.version)
                for netdev, texts in self.answers.addresses.items()}

    def route(self, destination: Address) -> Route:
        found = self.answers.routes.get(str(destination))
        if found is None:
            raise OSError(errno.ENETUNREACH, f"no route to {destination}: {os.strerror(errno.ENETUNREACH)}")
        return Route(destination, found.netdev, (found.source and ipaddress.ip_address(found.source)) or None,
                     (found.gateway and ipaddress.ip_address(found.gateway)) or None, found.local)

    def resolve(self, host: str) -> list[Address]:
        if host not in self.answers.names:
            raise OSError(errno.EADDRNOTAVAIL, f"host name {host!r} cannot be resolved: Name or service not known")
        return [ipaddress.ip_address(text) for text in self.answers.names[host]]

    def shm_nbytes(self) -> int | None:
        return self.answers.shm_nbytes

    def statistics(self, netdev: str) -> dict[str, int]:
        return self.answers.statistics.get(netdev, {})

    def pause_priorities(self, netdev: str) -> tuple[int, ...] | None:
        found = self.answers.pause_priorities.get(netdev)
        return None if found is None else tuple(found)

    def ping(self, address: Address, nbytes: int, netdev: str | None = None, timeout_s: float = 1.0) -> PingResult:
        """As `Kernel.ping`, without waiting."""
        if netdev is not None and self.answers.links is not None and f"{netdev}>{address}" not in self.answers.links:
            return PingResult.SILENT
        return PingResult.ANSWERED if nbytes <= self.answers.paths.get(str(address), 0) else PingResult.SILENT

    def connect(self, address: Address, port: int, timeout_s: float = 1.0) -> str:
        """As `Kernel.connect`; nothing listens on a recorded machine."""
        return "refused" if str(address) in self.answers.paths else "no answer"


def open_host(root: str | None = None) -> Host:
    """Return this machine, or the one recorded below *root*.

    Raises `ConfigError` if *root* is not a folder, or its answers.json does not have the fields of `KernelAnswers`.
    """
    if root is None:
        return Host()
    if not os.path.isdir(root):
        raise ConfigError(f"--root {root}: there is no such folder; expected one with a copy of /sys and /proc")
    tree = Tree(root)
    try:
        answers = msgspec.json.decode(tree.text(ANSWERS) or "{}", type=KernelAnswers)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"{tree.path(ANSWERS)} is not the answers of a kernel: {exc}") from exc
    return Host(tree, RecordedKernel(answers))
