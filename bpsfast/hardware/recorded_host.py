"""A recorded machine: a copy of its ``/sys`` and ``/proc``, and the kernel's answers in ``answers.json`` beside them.

Every field of `KernelAnswers` may be missing, which means unknown or empty. A user's machine can so be examined
elsewhere (``--root DIR``), and tests have machines that are not at hand.
"""
from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ..orchestration.errors import ConfigError
from .host import Host
from .kernel import Interface, Kernel
from .netlink import Address, Route
from .ping import PingResult
from .sysfs import Tree

ANSWERS = "answers.json"


class RecordedRoute(msgspec.Struct, forbid_unknown_fields=True):
    """`netlink.Route` as text."""

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
    """A `Kernel` that answers from `answers`. Thread-safe."""

    def __init__(self, answers: KernelAnswers) -> None:
        self.answers = answers

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment's variables, as recorded."""
        return self.answers.environ

    def addresses(self) -> dict[str, list[Interface]]:
        """As `Kernel.addresses`."""
        return {netdev: sorted(map(ipaddress.ip_interface, texts), key=lambda interface: interface.version)
                for netdev, texts in self.answers.addresses.items()}

    def route(self, destination: Address) -> Route:
        """As `Kernel.route`."""
        found = self.answers.routes.get(str(destination))
        if found is None:
            raise OSError(errno.ENETUNREACH, f"no route to {destination}: {os.strerror(errno.ENETUNREACH)}")
        return Route(destination, found.netdev, (found.source and ipaddress.ip_address(found.source)) or None,
                     (found.gateway and ipaddress.ip_address(found.gateway)) or None, found.local)

    def resolve(self, host: str) -> list[Address]:
        """As `Kernel.resolve`."""
        if host not in self.answers.names:
            raise OSError(errno.EADDRNOTAVAIL, f"host name {host!r} cannot be resolved: Name or service not known")
        return [ipaddress.ip_address(text) for text in self.answers.names[host]]

    def shm_nbytes(self) -> int | None:
        """As `Kernel.shm_nbytes`."""
        return self.answers.shm_nbytes

    def statistics(self, netdev: str) -> dict[str, int]:
        """As `Kernel.statistics`."""
        return self.answers.statistics.get(netdev, {})

    def pause_priorities(self, netdev: str) -> tuple[int, ...] | None:
        """As `Kernel.pause_priorities`."""
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


def host(root: str | None = None) -> Host:
    """Return this machine, or the one recorded below *root*.

    Raises
    ------
    ConfigError
        *root* is not a folder, or its answers.json does not have the fields of `KernelAnswers`.
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
