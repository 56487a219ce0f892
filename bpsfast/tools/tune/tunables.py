"""For ``bpsfast tune rdma``: machines' RDMA capabilities, the settings and values to try, and their `perf` plans."""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...base.settings import Settings
from ...base.value_formats import PATH_MTUS, parse_rdma_devices
from ...hardware import numa
from ...hardware.host import Host
from ...hardware.verbs import provider
from ...orchestration.errors import ConfigError, UnsupportedError
from ...pyx.pages import huge_page_nbytes
from ..perf import ping
from ..perf.perf_plan import Plan
from .search import Config, Tunable


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
        """device:port, as in the setting rdma_devices."""
        return f"{self.device}:{self.port}"


class HostCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. `rails`: best first towards the other side, those that its settings use before the others."""

    host: str
    rails: tuple[RailCapabilities, ...]
    rejected: dict[str, str]
    n_used: int
    n_numa: int
    cores: tuple[int, ...]
    huge_page_nbytes: int

    def require(self) -> tuple[RailCapabilities, ...]:
        """Return the rails; if there are none, raise `UnsupportedError` with the reason against every port."""
        if not self.rails:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())
            raise UnsupportedError(f"{self.host}: no RDMA port can be used: {reasons or 'there is no RDMA device'}. "
                                   "run `bpsfast doctor` there")
        return self.rails


def gather(host: Host, loaded: Settings, peer_host: str) -> HostCapabilities:
    """Return the capabilities of this machine, *host*, towards *peer_host*.

    Raises `ConfigError` if the settings name a device that does not exist; `OSError` if libibverbs or a device cannot
    be opened.
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

ONE_WAY, TWO_WAY, INCAST, LATENCY = "one-way", "two-way", "incast", "latency"
#: A size at which only latency matters, such as an empty contribution or a few scalars.
LATENCY_NBYTES = 64
_TURNS = 200
_RECEIVES = 512
#: The tuned settings; the transport reads each of them.
NAMES = ("partition_bytes", "credit_bytes", "rdma_devices", "rdma_queue_pairs", "rdma_queue_depth", "rdma_signal_every",
         "rdma_inline_bytes", "rdma_mtu", "rdma_traffic_class", "rdma_service_level", "rdma_relaxed_ordering",
         "huge_pages", "rdma_cores")


def rails_of(side: HostCapabilities, devices: str) -> list[RailCapabilities]:
    """Return the rails of *side* by rdma_devices, in the order of pairs; raise `ConfigError` if there are none."""
    if not devices:
        return list(side.require()[:side.n_used])
    wanted = parse_rdma_devices(devices)
    found = [rail for rail in side.require() if wanted.admits(rail.device, rail.port)]
    if not found:
        raise ConfigError(f"rdma_devices={devices!r} names no usable port of {side.host}")
    return found


def plan_of(config: dict[str, Any], load: str, rails: Sequence[RailCapabilities], n_rails: int, duration_s: float,
            timeout_s: float) -> Plan:
    """Return the plan for one of *n_rails* pairs of rails between two machines, within the limits of all *rails*."""
    mtu = min(rail.mtu for rail in rails)
    most = min(rail.max_qp_wr for rail in rails)
    shared: dict[str, Any] = {
        "timeout_s": timeout_s, "ack_timeout": Settings().rdma_timeout, "mtu": min(config["rdma_mtu"] or mtu, mtu),
        "traffic_class": config["rdma_traffic_class"], "service_level": config["rdma_service_level"],
        "relaxed_ordering": config["rdma_relaxed_ordering"], "huge_pages": config["huge_pages"] == "auto",
        "cores": config["rdma_cores"], "inline_nbytes": config["rdma_inline_bytes"],
        "receive_depth": min(_RECEIVES, most),
    }
    if load == LATENCY:
        return Plan(verb="lat", sizes=(LATENCY_NBYTES,), iterations=_TURNS, depth=min(config["rdma_queue_depth"], most),
                    **shared)
    nbytes = config["partition_bytes"]
    on_the_way = max(1, config["credit_bytes"] // nbytes // n_rails)
    pairs = min(config["rdma_queue_pairs"], on_the_way)
    depth = min(config["rdma_queue_depth"], most, max(1, on_the_way // pairs))
    return Plan(verb="bw", sizes=(nbytes,), duration_s=duration_s, pairs=pairs, depth=depth,
                moderation=min(config["rdma_signal_every"], depth), both_ways=load == TWO_WAY,
                reversed=load == INCAST, **shared)

_MIB = 1 << 20
_LEAST_MTU = 1024
#: Kernel drivers that pass the flag to the card; others ignore it.
_ORDERING_DRIVERS = frozenset({"mlx5_core"})
#: Smallest pool that holds the registered memory of the smallest run.
_LEAST_POOL_NBYTES = 64 * _MIB


class Choice(NamedTuple):
    """Tunables to try, and the reason against each other setting."""

    tunables: list[Tunable]
    untried: dict[str, str]


def choose(start: Config, own: HostCapabilities, partners: Sequence[HostCapabilities], goal: str,
           traffic_classes: Sequence[int] = (), service_levels: Sequence[int] = (), only: Sequence[str] = ()) -> Choice:
    """Return which settings to try, starting from *start*, judged under the load *goal*.

    *traffic_classes*, *service_levels*: values that the network supports according to the user; *only*: the settings to
    try (empty: all).
    """
    sides = [own, *partners]
    rails = [rail for side in sides for rail in rails_of(side, start["rdma_devices"] if side is own else "")]
    found: list[Tunable] = []
    untried: dict[str, str] = {}

    def offer(name: str, values: Sequence[Any], otherwise: str, load: str = goal) -> None:
        values = tuple(value for value in values if value != start[name])
        if only and name not in only:
            untried[name] = "--only does not name it"
        elif values:
            found.append(Tunable(name, values, load))
        else:
            untried[name] = otherwise

    most_posts = min(rail.max_qp_wr for rail in rails)
    most_pairs = min(rail.max_qp for rail in rails)
    offer("partition_bytes", (256 << 10, 512 << 10, _MIB, 2 * _MIB, 4_096_000, 8 * _MIB), "")
    offer("credit_bytes", tuple(n * _MIB for n in (4, 8, 16, 32, 64)), "")
    offer("rdma_queue_pairs", [n for n in (1, 2, 4, 8) if n <= most_pairs], f"a port has max_qp={most_pairs}")
    offer("rdma_queue_depth", [n for n in (8, 32, 128, 512) if n <= most_posts], f"a port has max_qp_wr={most_posts}")
    offer("rdma_signal_every", (1, 4, 16), "")
    offer("rdma_inline_bytes", (0, 64, 256), "", LATENCY)
    offer("rdma_devices", *_rails(own, partners))
    mtu = min(rail.mtu for rail in rails)
    offer("rdma_mtu", [0, *(each for each in PATH_MTUS if _LEAST_MTU <= each < mtu)],
          f"the active MTU is {mtu}: smaller packets only cost time")
    # only the switches' administrator knows what they protect
    on_ethernet = any(rail.link_layer == "Ethernet" for rail in rails)
    offer("rdma_traffic_class", traffic_classes,
          "the switches define which classes are protected: name those to try with --traffic-class 0,106" if on_ethernet
          else "InfiniBand has service levels instead")
    offer("rdma_service_level", service_levels,
          "the fabric defines the levels: name those to try with --service-level 0,3")
    ignoring = sorted({rail.driver for rail in rails} - _ORDERING_DRIVERS)
    offer("rdma_relaxed_ordering", () if ignoring else (False, True), f"the driver {', '.join(ignoring)} ignores it")
    poor = [side.host for side in sides if side.huge_page_nbytes < _LEAST_POOL_NBYTES]
    offer("huge_pages", () if poor else ("auto", "off"),
          f"no pool of 2 MiB pages on {', '.join(dict.fromkeys(poor))}: sysctl vm.nr_hugepages=512 makes one of 1 GiB")
    offer("rdma_cores", *_cores(sides, rails))
    return Choice(found, untried)


def _rails(own: HostCapabilities, partners: Sequence[HostCapabilities]) -> tuple[list[str], str]:
    names = [rail.name for rail in sorted(own.rails, key=lambda rail: (rail.device, rail.port))]
    if len(names) < 2:
        return [], f"{own.host} has one usable port, {names[0]}"
    for partner in partners:
        theirs = {rail.name for rail in partner.rails}
        if not set(names) <= theirs:
            return [], (f"{own.host} has {', '.join(names)} and {partner.host} {', '.join(sorted(theirs))}: one "
                        "profile cannot name both")
    return [*(f"={name}" for name in names), "=" + ",".join(names)], ""


def _cores(sides: Sequence[HostCapabilities], rails: Sequence[RailCapabilities]) -> tuple[list[str], str]:
    """Return "numa" if it makes a difference, and a core near all devices; not the first, which serves interrupts."""
    values = []
    if all(side.n_numa > 1 for side in sides) and all(rail.numa_node is not None and rail.near for rail in rails):
        values.append("numa")
    common = set.intersection(*(set(side.cores) for side in sides), *(set(rail.near) for rail in rails))
    if len(common) > 1:
        values.append(str(max(common)))
    return values, "there is one NUMA node, and no second core near the devices of all machines"
