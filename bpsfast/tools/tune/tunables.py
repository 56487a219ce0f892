"""Which settings may be tried between these machines, with which values; and of every other one why not, in a line."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...base.value_formats import PATH_MTUS
from .capabilities import HostCapabilities, RailCapabilities
from .perf_options import LATENCY, rails_of
from .search import Config, Tunable

_MIB = 1 << 20
_LEAST_MTU = 1024
#: Drivers of the kernel that pass the flag on to the card; the others ignore it.
_ORDERING_DRIVERS = frozenset({"mlx5_core"})
#: Below this the pool could not hold what is registered for the smallest run.
_LEAST_POOL_NBYTES = 64 * _MIB


class Choice(NamedTuple):
    """Knobs to try, and by setting the reason why it is not tried."""

    knobs: list[Tunable]
    untried: dict[str, str]


def choose(start: Config, own: HostCapabilities, partners: Sequence[HostCapabilities], goal: str, traffic_classes: Sequence[int] = (),
           service_levels: Sequence[int] = (), only: Sequence[str] = ()) -> Choice:
    """Return what may be tried, starting from *start*, judged under the load *goal*.

    *traffic_classes*, *service_levels*: values that the network is made for, as the user says; *only*: the settings
    that he wants tried (empty: all).
    """
    sides = [own, *partners]
    rails = [rail for side in sides for rail in rails_of(side, start["rdma_devices"] if side is own else "")]
    knobs: list[Tunable] = []
    untried: dict[str, str] = {}

    def offer(name: str, values: Sequence[Any], otherwise: str, load: str = goal) -> None:
        values = tuple(value for value in values if value != start[name])
        if only and name not in only:
            untried[name] = "--only does not name it"
        elif values:
            knobs.append(Tunable(name, values, load))
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
          f"the active MTU is {mtu}: smaller packets only cost")
    # what the switches protect is theirs to say
    on_ethernet = any(rail.link_layer == "Ethernet" for rail in rails)
    offer("rdma_traffic_class", traffic_classes,
          "the switches decide which class is protected: name those to try by --traffic-class 0,106" if on_ethernet
          else "InfiniBand has service levels instead")
    offer("rdma_service_level", service_levels,
          "the fabric decides which levels there are: name those to try by --service-level 0,3")
    ignoring = sorted({rail.driver for rail in rails} - _ORDERING_DRIVERS)
    offer("rdma_relaxed_ordering", () if ignoring else (False, True),
          f"the driver {', '.join(ignoring)} ignores it")
    poor = [side.host for side in sides if side.huge_page_nbytes < _LEAST_POOL_NBYTES]
    offer("huge_pages", () if poor else ("auto", "off"),
          f"no pool of 2 MiB pages on {', '.join(dict.fromkeys(poor))}: sysctl vm.nr_hugepages=512 makes one of 1 GiB")
    offer("rdma_cores", *_cores(sides, rails))
    return Choice(knobs, untried)


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
    """Return "numa" where that says something, and one core beside the devices that is no first one: those serve
    interrupts."""
    values = []
    if all(side.n_numa > 1 for side in sides) and all(rail.numa_node is not None and rail.near for rail in rails):
        values.append("numa")
    common = set.intersection(*(set(side.cores) for side in sides), *(set(rail.near) for rail in rails))
    if len(common) > 1:
        values.append(str(max(common)))
    return values, "one NUMA node, and no two cores that all machines have beside their devices"
