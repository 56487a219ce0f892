"""The facts that checks of ``bpsfast doctor`` use: machine, settings, libibverbs, the peer's report, environment."""
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
from ...hardware.host import Host
from ...hardware.kernel import Address, Route
from ...hardware.rdma_devices import Port, RdmaDevice, roce_mtu
from ...hardware.rdma_route import Rail, RailChoice, choose, incapable
from ...hardware.verbs import provider as find_provider
from ...orchestration.errors import ConfigError


class PeerPort(msgspec.Struct, frozen=True, kw_only=True):
    """A usable port: `gid` as an address, `mtu` of the interface, `path_mtu` of RDMA packets (bytes, 0: unknown)."""

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
        """The address that reaches the port; None on InfiniBand."""
        return ipaddress.ip_address(self.gid) if self.gid and self.gid_version != "IB" else None


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of one machine: used ones, then spare ones; `rejected` gives the reasons against the others.

    `transport` is the setting. `reached` is the result of its connection to the asking machine: "open", a reason, or ""
    if it was not asked to connect.
    """

    version: str
    hostname: str
    transport: str
    used: list[PeerPort] = []
    spare: list[PeerPort] = []
    rejected: dict[str, str] = {}
    reached: str = ""


def describe_ports(host: Host, choice: RailChoice, path_mtus: dict[str, int]) -> tuple[list[PeerPort], list[PeerPort]]:
    """Return the ports that *choice* uses and its spare ones; *path_mtus* are those that libibverbs reports."""
    ports = {f"{device.name}/{port.number}": (device, port) for device, port in host.ports}

    def described(rail: Rail) -> PeerPort:
        device, port = ports[rail.name]
        card = host.netdevs.get(rail.netdev or "")
        mtu = card.mtu if card else 0
        return PeerPort(
            name=rail.name, link_layer=port.link_layer, driver=device.driver, netdev=rail.netdev or "", mtu=mtu,
            path_mtu=path_mtus.get(rail.name) or (roce_mtu(mtu) if port.is_roce and mtu else 0),
            rate_gbps=port.rate_gbps or 0.0, lid=port.lid,
            gid=str(rail.gid.address) if rail.gid else "", gid_version=rail.gid.version if rail.gid else "")

    return list(map(described, choice.rails)), list(map(described, choice.spare))

#: Sizes of test registrations in bytes; the usual default limits (64 KiB, 8 MiB) lie between them.
TRIALS = (1 << 20, 16 << 20, 64 << 20)


@dataclass(frozen=True)
class OpenedDevice:
    """The result of opening a device: limits, ports by number, and the largest size that it registered in bytes."""

    error: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    ports: dict[int, dict[str, Any]] = field(default_factory=dict)
    registered_nbytes: int = 0
    registration_error: str = ""


@dataclass(frozen=True)
class VerbsReport:
    """The result of loading libibverbs. If it failed, `error` says why and the rest is empty.

    `fork` is "unneeded", "enabled" or "disabled: REASON" (`bpsfast.pyx.verbs.fork_safety`).
    """

    provider: str
    error: str = ""
    version: str = ""
    fork: str = ""
    devices: dict[str, OpenedDevice] = field(default_factory=dict)


def ask_verbs(provider: str = "native") -> VerbsReport:
    """Load libibverbs, open every device and register up to 64 MiB with each; an OSError becomes text in the report."""
    try:
        verbs = find_provider(provider)
        return VerbsReport(provider, version=verbs.version(), fork=verbs.fork_safety(),
                           devices={name: _open(verbs, name) for name in verbs.devices()})
    except OSError as exc:
        return VerbsReport(provider, error=exc.strerror or str(exc))


def recorded_verbs(answer: Any) -> VerbsReport | None:
    """Return the report of a recorded machine, None if it has none; raise `ConfigError` if *answer* is not one."""
    if answer is None:
        return None
    try:
        return msgspec.convert(answer, VerbsReport, str_keys=True)
    except msgspec.MsgspecError as exc:
        raise ConfigError(f"the libibverbs report of the recorded machine cannot be read: {exc}") from exc


def _open(verbs: Any, name: str) -> OpenedDevice:
    try:
        with verbs.Device(name) as device:
            attributes = dict(device.attributes)
            ports = {number: device.port(number) for number in range(1, attributes.get("phys_port_cnt", 1) + 1)}
            with verbs.ProtectionDomain(device) as domain:
                nbytes, error = _register(verbs, domain)
    except OSError as exc:
        return OpenedDevice(error=exc.strerror or str(exc))
    return OpenedDevice("", attributes, ports, nbytes, error)


def _register(verbs: Any, domain: Any) -> tuple[int, str]:
    """Return the largest size of `TRIALS` that could be registered, and why the next one could not."""
    done = 0
    for nbytes in TRIALS:
        with mmap.mmap(-1, nbytes) as memory:
            try:
                verbs.MemoryRegion(domain, memory).close()
            except OSError as exc:  # the check names device and remedy better than the error's own text
                return done, f"ibv_reg_mr of {nbytes >> 20} MiB: {os.strerror(exc.errno or 0)}"
        done = nbytes
    return done, ""


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
    """Time (ns) of a cache line between CPUs *first* and *second*, the slowest pair of a shared cache; or `error`."""

    first: int = -1
    second: int = -1
    ns: float = 0.0
    error: str = ""


class Facts:
    """Everything a check may use. Each fact is computed on first use. One thread.

    *verbs* is the report of libibverbs, None on a recorded machine without one; *peer* the name and address of the
    other machine, if the user gave one; *timeout_s* the longest wait for a ping to it.
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
        #: report of the peer's doctor; None if it was not asked, or if `peer_silence` says why it did not answer
        self.peer_report: PeerReport | None = None
        self.peer_silence = ""
        #: result of a queue pair to the peer: "" it carried data, None it was not tested, else why it failed
        self.trial_error: str | None = None
        #: cache line latency between cores that share a cache; None: not measured
        self.cache_latency: CacheLineLatency | None = None

    # -- devices -----------------------------------------------------------------------------------------------------

    @cached_property
    def choice(self) -> RailChoice:
        """The ports that would be used; settings that contradict the machine are ignored."""
        if self.choice_error:
            return choose(self.host, peer=self.peer)
        return choose(self.host, self.settings, self.peer)

    @cached_property
    def choice_error(self) -> str:
        """Why the settings rdma_devices, rdma_gid_index and rdma_pkey cannot be met; "" if they can."""
        try:
            choose(self.host, self.settings)
        except ConfigError as exc:
            return str(exc)
        return ""

    @cached_property
    def capable(self) -> list[RdmaDevice]:
        """The devices with the features that the transport needs, in any state."""
        return [device for device in self.host.devices if incapable(device) is None]

    @cached_property
    def usable(self) -> list[tuple[RdmaDevice, Port]]:
        """The ports that could be used, chosen or not."""
        names = {rail.name for rail in (*self.choice.rails, *self.choice.spare)}
        return [(device, port) for device, port in self.host.ports if f"{device.name}/{port.number}" in names]

    @cached_property
    def is_software(self) -> bool:
        """Whether the kernel emulates all usable devices."""
        return all(device.driver in ("rxe", "siw") for device, _ in self.usable)

    @cached_property
    def path_mtus(self) -> dict[str, int]:
        """The path MTU in bytes that each port uses, by "device/port", as far as libibverbs reports it."""
        return {f"{name}/{number}": port["active_mtu"] for name, each in self.opened.items()
                for number, port in each.ports.items() if port.get("active_mtu")}

    @property
    def opened(self) -> dict[str, OpenedDevice]:
        """The devices that libibverbs lists, by name."""
        return self.verbs.devices if self.verbs else {}

    @property
    def route(self) -> Route | None:
        """The route to the peer; None if there is none."""
        return self.choice.route

    def variants(self, host: str, docker: str = "", k8s: str = "", slurm: str = "") -> dict[str, str]:
        """Return the remedies that fit the environment of this process."""
        if self.container == "kubernetes":
            return {"k8s": k8s or host}
        if self.container:
            return {"docker": docker or host} | ({"k8s": k8s} if k8s and self.container == "container" else {})
        return {"host": host} | ({"slurm": slurm} if slurm and self.in_slurm else {})

    # -- environment -------------------------------------------------------------------------------------------------

    @cached_property
    def hostname(self) -> str:
        """This machine's own name."""
        return self.host.tree.text("proc/sys/kernel/hostname") or "unknown"

    @cached_property
    def kernel_release(self) -> str:
        """The kernel release, as ``uname -r`` prints it."""
        return self.host.tree.text("proc/sys/kernel/osrelease") or "unknown"

    @cached_property
    def kernel_version(self) -> tuple[int, int]:
        """Major and minor version of the kernel; (0, 0) if unknown."""
        found = re.match(r"(\d+)\.(\d+)", self.kernel_release)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @cached_property
    def uid(self) -> int:
        """The effective user id."""
        words = self.host.tree.fields("proc/self/status").get("Uid", "").split()
        return int(words[1]) if len(words) > 1 else -1

    @cached_property
    def user(self) -> str:
        """The user's name, or the number if it has no name."""
        for line in (self.host.tree.text("etc/passwd") or "").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2] == str(self.uid):
                return fields[0]
        return str(self.uid)

    @cached_property
    def container(self) -> str:
        """The kind of container: "kubernetes", "docker", "podman", "container", or "" on the host."""
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

    @property
    def in_slurm(self) -> bool:
        """Whether this process runs under SLURM."""
        return "SLURM_JOB_ID" in self.host.kernel.environ

    @cached_property
    def memlock_nbytes(self) -> tuple[int | None, int | None]:
        """Soft and hard limit of locked memory in bytes; None is unlimited."""
        for line in (self.host.tree.text("proc/self/limits") or "").splitlines():
            if line.startswith("Max locked memory"):
                soft, hard = line.removeprefix("Max locked memory").split()[:2]
                return _limit(soft), _limit(hard)
        return None, None

    @cached_property
    def login_memlock(self) -> tuple[int | None, str] | None:
        """Soft limit of locked memory (bytes) that pam_limits sets at login for ordinary users, and the file with it.

        None if no file sets it. The limit of this process may differ, if it is older, root's or a service's.
        """
        found: tuple[int | None, str] | None = None
        folder = "etc/security/limits.d"
        names = [f"{folder}/{name}" for name in sorted(self.host.tree.names(folder)) if name.endswith(".conf")]
        for path in ["etc/security/limits.conf", *names]:  # the last matching line counts
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
        """Whether CAP_IPC_LOCK lifts the limit: it is effective, and in the initial user namespace."""
        capabilities = self.host.tree.fields("proc/self/status").get("CapEff") or "0"
        effective = int(capabilities, 16) >> _CAP_IPC_LOCK & 1
        words = (self.host.tree.text("proc/self/uid_map") or "0 0 4294967295").split()
        return bool(effective) and words[:3] == ["0", "0", "4294967295"]

    @cached_property
    def modules(self) -> frozenset[str]:
        """The loaded kernel modules."""
        return frozenset(line.split()[0] for line in (self.host.tree.text("proc/modules") or "").splitlines() if line)

    @cached_property
    def install(self) -> str:
        """The command that installs libibverbs and its providers."""
        release = dict(line.partition("=")[::2] for line in (self.host.tree.text("etc/os-release") or "").splitlines())
        words = [word for key in ("ID", "ID_LIKE") for word in release.get(key, "").strip('"').split()]
        return next((command for word in words for name, command in _PACKAGES.items() if name in word),
                    "install libibverbs and the rdma-core package of your distribution")


def _limit(word: str) -> int | None:
    return None if word == "unlimited" else int(word)
