"""What all checks look at: the machine, the settings, what libibverbs said, the peer; and who we are on it."""
from __future__ import annotations

import ipaddress
import mmap
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from ...base.settings import Settings
from ...hardware.gids import Gid
from ...hardware.host import Host
from ...hardware.netlink import Address, Route
from ...hardware.rdma_devices import Port, RdmaDevice, roce_mtu
from ...hardware.rdma_route import RailChoice, choose, incapable
from ...hardware.verbs import provider as find_provider
from ...orchestration.errors import ConfigError


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


def describe_ports(host: Host, choice: RailChoice, path_mtus: dict[str, int]) -> tuple[list[PeerPort], list[PeerPort]]:
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

#: Sizes of the trial registrations, in bytes; the default limits of distributions (64 KiB, 8 MiB) lie in between.
TRIALS = (1 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class OpenedDevice:
    """What came of opening one device: its limits, its ports by number, and how much memory it registered (bytes)."""

    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    ports: dict[int, dict[str, Any]] = field(default_factory=dict)
    registered_nbytes: int = 0
    registration_error: str = ""


@dataclass(frozen=True)
class VerbsReport:
    """What came of loading the library. `error` says why it could not be; then the rest is empty.

    `fork`: "unneeded", "enabled" or "disabled: why", as `bpsfast.pyx.verbs.fork_safety` says.
    """

    provider: str
    error: str = ""
    version: str = ""
    fork: str = ""
    devices: dict[str, OpenedDevice] = field(default_factory=dict)


def ask_verbs(provider: str = "native") -> VerbsReport:
    """Load the library, open every device and register up to 64 MiB with each. OSError becomes words in the report."""
    try:
        verbs = find_provider(provider)
        return VerbsReport(provider, version=verbs.version(), fork=verbs.fork_safety(),
                           devices={name: _open(verbs, name) for name in verbs.devices()})
    except OSError as exc:
        return VerbsReport(provider, error=_words(exc))


def recorded_verbs(answer: Any) -> VerbsReport | None:
    """Return the report of a recorded machine, None if nobody asked libibverbs there.

    Raises
    ------
    ConfigError
        *answer* is no such report.
    """
    if answer is None:
        return None
    try:
        return msgspec.convert(answer, VerbsReport, str_keys=True)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"what libibverbs said on the recorded machine cannot be read: {exc}") from exc


def _open(verbs: Any, name: str) -> OpenedDevice:
    try:
        with verbs.Device(name) as device:
            attributes = dict(device.attributes)
            ports = {number: device.port(number) for number in range(1, attributes.get("phys_port_cnt", 1) + 1)}
            with verbs.ProtectionDomain(device) as domain:
                nbytes, error = _register(verbs, domain)
    except OSError as exc:
        return OpenedDevice(error=_words(exc))
    return OpenedDevice("", attributes, ports, nbytes, error)


def _register(verbs: Any, domain: Any) -> tuple[int, str]:
    """Return the largest of `TRIALS` that could be registered, and why the next one could not."""
    done = 0
    for nbytes in TRIALS:
        with mmap.mmap(-1, nbytes) as memory:
            try:
                verbs.MemoryRegion(domain, memory).close()
            except OSError as exc:  # its own words name the device and the remedy, which the check does better
                return done, f"ibv_reg_mr of {nbytes >> 20} MiB: {os.strerror(exc.errno or 0)}"
        done = nbytes
    return done, ""


def _words(exc: OSError) -> str:
    return exc.strerror or str(exc)

_CAP_IPC_LOCK = 14
#: distribution (ID or ID_LIKE of os-release) -> how to install libibverbs and its providers
_PACKAGES = {
    "debian": "sudo apt install libibverbs1 ibverbs-providers",
    "rhel": "sudo dnf install libibverbs rdma-core",
    "fedora": "sudo dnf install libibverbs rdma-core",
    "suse": "sudo zypper install libibverbs1 rdma-core",
    "arch": "sudo pacman -S rdma-core",
    "alpine": "apk add rdma-core-libs",
}


@dataclass(frozen=True)
class CacheLineLatency:
    """A cache line took *ns* from CPU *first* to CPU *second*, the farthest of those that are said to share a cache;
    or why it was not measured.
    """

    first: int = -1
    second: int = -1
    ns: float = 0.0
    error: str = ""


class Facts:
    """Everything a check may look at. Each fact is found once, when first asked for. One thread.

    Parameters
    ----------
    verbs
        What libibverbs said; None on a recorded machine where nobody asked it.
    peer
        Name and address of the other machine, if the user gave one.
    timeout_s
        How long a ping to the peer may take.
    """

    def __init__(self, host: Host, settings: Settings, origins: dict[str, str], verbs: VerbsReport | None = None,
                 peer: tuple[str, Address] | None = None, timeout_s: float = 1.0) -> None:
        self.host = host
        self.settings = settings
        self.origins = origins
        self.verbs = verbs
        self.peer_name: str = peer[0] if peer else ""
        self.peer: Address | None = peer[1] if peer else None
        self.timeout_s = timeout_s
        #: what the peer's doctor said; None: it was not asked, or `peer_silence` says why it did not answer
        self.peer_report: PeerReport | None = None
        self.peer_silence = ""
        #: what became of a queue pair to the peer: "" it carried data, None nobody tried, else why it did not
        self.trial_error: str | None = None
        #: how far apart cores are that are said to share a cache; None: nobody has measured it
        self.cache_latency: CacheLineLatency | None = None

    # -- which device would be used ----------------------------------------------------------------------------------

    @cached_property
    def choice(self) -> RailChoice:
        """The ports that would be used; without those the settings forbid if they contradict the machine."""
        try:
            return choose(self.host, devices=self.settings.rdma_devices, gid_index=self.settings.rdma_gid_index,
                          peer=self.peer)
        except ConfigError:
            return choose(self.host, peer=self.peer)

    @cached_property
    def choice_error(self) -> str:
        """What the settings rdma_devices and rdma_gid_index ask for in vain, "" if nothing."""
        try:
            choose(self.host, devices=self.settings.rdma_devices, gid_index=self.settings.rdma_gid_index)
        except ConfigError as exc:
            return str(exc)
        return ""

    @cached_property
    def capable(self) -> list[RdmaDevice]:
        """The devices that have what the transport needs, whatever state they are in."""
        return [device for device in self.host.devices if incapable(device) is None]

    @cached_property
    def usable(self) -> list[tuple[RdmaDevice, Port]]:
        """The ports that could be used, chosen or not."""
        names = {rail.name for rail in (*self.choice.rails, *self.choice.spare)}
        return [(device, port) for device, port in self.host.ports if f"{device.name}/{port.number}" in names]

    @cached_property
    def used(self) -> list[tuple[RdmaDevice, Port]]:
        """The ports that would be used."""
        names = {rail.name for rail in self.choice.rails}
        return [each for each in self.usable if f"{each[0].name}/{each[1].number}" in names]

    @cached_property
    def path_mtus(self) -> dict[str, int]:
        """The path MTU (bytes) that each port runs with, by "device/port", as far as libibverbs said."""
        opened = self.verbs.devices if self.verbs else {}
        return {f"{name}/{number}": port["active_mtu"] for name, each in opened.items()
                for number, port in each.ports.items() if port.get("active_mtu")}

    @cached_property
    def route(self) -> Route | None:
        """The route to the peer; None without one."""
        return self.choice.route

    def variants(self, host: str, docker: str = "", k8s: str = "", slurm: str = "") -> dict[str, str]:
        """Return, of the ways to put something right, those that fit where this process runs."""
        if self.container == "kubernetes":
            return {"k8s": k8s or host}
        if self.container:
            return {"docker": docker or host} | ({"k8s": k8s} if k8s and self.container == "container" else {})
        return {"host": host} | ({"slurm": slurm} if slurm and self.in_slurm else {})

    # -- who we are --------------------------------------------------------------------------------------------------

    @cached_property
    def hostname(self) -> str:
        """This machine's name for itself."""
        return self.host.tree.text("proc/sys/kernel/hostname") or "unknown"

    @cached_property
    def kernel_release(self) -> str:
        """As ``uname -r`` prints it."""
        return self.host.tree.text("proc/sys/kernel/osrelease") or "unknown"

    @cached_property
    def kernel_version(self) -> tuple[int, int]:
        """Major and minor number of the kernel; (0, 0) if it does not say."""
        found = re.match(r"(\d+)\.(\d+)", self.kernel_release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @cached_property
    def uid(self) -> int:
        """The effective user id."""
        words = self._status("Uid").split()
        return int(words[1]) if len(words) > 1 else -1

    @cached_property
    def user(self) -> str:
        """The user's name, or the number if there is no name."""
        for line in (self.host.tree.text("etc/passwd") or "").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2] == str(self.uid):
                return fields[0]
        return str(self.uid)

    @cached_property
    def container(self) -> str:
        """"kubernetes", "docker", "podman", "container" or, on the host itself, ""."""
        tree = self.host.tree
        if "KUBERNETES_SERVICE_HOST" in self.host.kernel.environ or tree.exists("var/run/secrets/kubernetes.io"):
            return "kubernetes"
        if tree.exists("run/.containerenv"):
            return "podman"
        if tree.exists(".dockerenv"):
            return "docker"
        groups = tree.text("proc/1/cgroup") or ""
        return next((name for word, name in (("kubepods", "kubernetes"), ("docker", "docker"), ("libpod", "podman"),
                                             ("containerd", "container"), ("lxc", "container")) if word in groups), "")

    @cached_property
    def in_slurm(self) -> bool:
        """Whether SLURM started this process."""
        return "SLURM_JOB_ID" in self.host.kernel.environ

    @cached_property
    def memlock_nbytes(self) -> tuple[int | None, int | None]:
        """The soft and the hard limit of locked memory in bytes; None is unlimited."""
        for line in (self.host.tree.text("proc/self/limits") or "").splitlines():
            if line.startswith("Max locked memory"):
                soft, hard = line.removeprefix("Max locked memory").split()[:2]
                return _limit(soft), _limit(hard)
        return None, None

    @cached_property
    def login_memlock(self) -> tuple[int | None, str] | None:
        """The soft limit of locked memory (bytes; None is unlimited) that pam_limits gives any user but root at login,
        and the file that says so; None if none does. This process's own may be older, or root's, or a service's.
        """
        found: tuple[int | None, str] | None = None
        folder = "etc/security/limits.d"
        names = [f"{folder}/{name}" for name in sorted(self.host.tree.names(folder)) if name.endswith(".conf")]
        for path in ["etc/security/limits.conf", *names]:  # of several lines the last one counts
            for line in (self.host.tree.text(path) or "").splitlines():
                words = line.partition("#")[0].split()
                if len(words) == 4 and words[0] == "*" and words[1] in ("soft", "-") and words[2] == "memlock":
                    if words[3] in ("unlimited", "infinity", "-1"):
                        found = None, f"/{path}"
                    elif words[3].isdecimal():
                        found = int(words[3]) * 1024, f"/{path}"
        return found

    @cached_property
    def can_lock_memory(self) -> bool:
        """Whether CAP_IPC_LOCK lifts the limit: effective, and in the first user namespace, which alone counts."""
        effective = int(self._status("CapEff") or "0", 16) >> _CAP_IPC_LOCK & 1
        words = (self.host.tree.text("proc/self/uid_map") or "0 0 4294967295").split()
        return bool(effective) and words[:3] == ["0", "0", "4294967295"]

    @cached_property
    def modules(self) -> frozenset[str]:
        """The kernel's loaded modules."""
        return frozenset(line.split()[0] for line in (self.host.tree.text("proc/modules") or "").splitlines() if line)

    @cached_property
    def install(self) -> str:
        """What to type to install libibverbs and its providers."""
        release = dict(line.partition("=")[::2] for line in (self.host.tree.text("etc/os-release") or "").splitlines())
        words = [word for key in ("ID", "ID_LIKE") for word in release.get(key, "").strip('"').split()]
        return next((command for word in words for name, command in _PACKAGES.items() if name in word),
                    "install libibverbs and the rdma-core package of your distribution")

    def _status(self, name: str) -> str:
        """Return one field of /proc/self/status."""
        for line in (self.host.tree.text("proc/self/status") or "").splitlines():
            field, _, value = line.partition(":")
            if field == name:
                return value.strip()
        return ""


def _limit(word: str) -> int | None:
    return None if word == "unlimited" else int(word)
