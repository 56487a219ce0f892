"""Decides which GPUs of a machine sum a partition before the node process does, and which GPU copies it to the host.

A set of GPUs that sum among themselves is an island. The first rank of a machine decides for all of its ranks, from the
machine's strategy (`hardware.topology.strategy`). A strategy speaks of fractions of all partitions, but a partition
takes one route. The partition's number alone tells which, so all ranks of the machine agree: multiples of the golden
ratio modulo 1 fill fractions evenly.
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import msgspec

from ..base.settings import Settings
from ..gpu.cuda import CudaDevice
from ..gpu.device import Device
from ..hardware.topology import discovery
from ..hardware.topology.decision import strategy_of
from ..hardware.topology.graph import PartKind, of_host, with_gpus
from ..hardware.topology.strategy_solver import NOTHING, Strategy
from ..orchestration.errors import BpsError, ConfigError, error_of
from ..trainer.session import Session
from .group import Group

log = logging.getLogger("bpsfast.gpu")
_GOLDEN = 0.6180339887498949


class Route(msgspec.Struct, frozen=True):
    """A route for the fraction `share` of all partitions: its islands, and the fraction that each root copies."""

    share: float
    islands: tuple[tuple[int, ...], ...]
    roots: tuple[tuple[tuple[int, float], ...], ...]


class PartitionRoute(msgspec.Struct, frozen=True):
    """The route of one partition: the ranks of *island* sum it, and *root* copies it to the host."""

    island: tuple[int, ...]
    root: int


class IslandRoutes(msgspec.Struct, frozen=True):
    """All routes of one machine; none where ranks do not sum on GPUs."""

    routes: tuple[Route, ...]

    def partition_route(self, part: int, rank: int) -> PartitionRoute:
        """Return the route of *rank*'s input of the job's partition *part*; a rank in no island is its own root."""
        at = part * _GOLDEN % 1.0
        for route in self.routes:
            if at < route.share or route is self.routes[-1]:
                return _route_of(route, at / route.share if route.share else 0.0, rank)
            at -= route.share
        return PartitionRoute((rank,), rank)

    def islands(self) -> list[tuple[int, ...]]:
        """Return every island of more than one rank, in the same order on all ranks."""
        return sorted({island for route in self.routes for island in route.islands if len(island) > 1})


def _route_of(route: Route, at: float, rank: int) -> PartitionRoute:
    for island, roots in zip(route.islands, route.roots):
        if rank not in island:
            continue
        for root, part in roots:
            if at < part:
                return PartitionRoute(island, root)
            at -= part
        return PartitionRoute(island, roots[-1][0])
    return PartitionRoute((rank,), rank)


def routes_of(strategy: Strategy, rank_of: Mapping[str, int]) -> IslandRoutes:
    """Return the routes of *strategy*; *rank_of* maps its GPUs to ranks, and GPUs that are not in it are left out."""
    routes = []
    for way in strategy.ways:
        parts = way.roots()
        islands, roots = [], []
        for gpus in way.islands:
            members = [gpu for gpu in gpus if gpu in rank_of]
            if members:
                islands.append(tuple(rank_of[gpu] for gpu in members))
                roots.append(_shares([(rank_of[gpu], parts.get(gpu, 0.0)) for gpu in members]))
        routes.append(Route(way.share, tuple(islands), tuple(roots)))
    return IslandRoutes(tuple(routes))


def shared_routes(gpu_of: Sequence[tuple[int, str]]) -> IslandRoutes:
    """Return the route of a machine with these (rank, GPU): ranks of one GPU are an island and copy equal parts."""
    gpus: dict[str, list[int]] = {}
    for rank, gpu in sorted(gpu_of):
        gpus.setdefault(gpu, []).append(rank)
    islands = tuple(tuple(ranks) for ranks in gpus.values())
    return IslandRoutes((Route(1.0, islands, tuple(_shares([(rank, 0.0) for rank in ranks]) for ranks in islands)),))


def _shares(parts: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return *parts* as fractions of their sum, without those that are zero; equal fractions if all are."""
    some = [(rank, part) for rank, part in parts if part > NOTHING] or [(rank, 1.0) for rank, _ in parts]
    total = sum(part for _, part in some)
    return tuple((rank, part / total) for rank, part in some)


class _Member(msgspec.Struct, frozen=True):
    """A rank, its node and its GPU's PCIe address ("" for the host device)."""

    rank: int
    node: int
    local_rank: int
    gpu: str


class _Decided(msgspec.Struct, frozen=True):
    routes: IslandRoutes | None = None
    error: str = ""
    reason: str = ""


def agree(session: Session, device: Device) -> IslandRoutes:
    """Return the routes of this machine; this rank has *device*. Collective over all ranks of the job.

    Raises `ConfigError` on all ranks of the machine, if it does not have what settings ask for. Raises `StallError` or
    `PeerLostError` if a rank does not come in time, or is gone.
    """
    own = _Member(session.rank, session.node, session.local_rank, _address(device))
    everybody = island_group(session, range(session.size), "devices")
    members = [msgspec.msgpack.decode(each, type=_Member)
               for each in everybody.all_gather_bytes(msgspec.msgpack.encode(own))]
    everybody.close()
    here = sorted((member for member in members if member.node == session.node), key=lambda member: member.local_rank)
    if len(here) == 1:
        return IslandRoutes(())
    group = island_group(session, [member.rank for member in here], "routes")
    said = msgspec.msgpack.encode(_decide(here, session.settings)) if group.rank == 0 else b""
    decided = msgspec.msgpack.decode(group.broadcast_bytes(said, 0), type=_Decided)
    group.close()
    if decided.routes is None:
        raise error_of(decided.error, decided.reason)
    return decided.routes


def island_group(session: Session, ranks: Sequence[int], what: str) -> Group:
    """Return a group of *ranks* for *what*; its name clashes with no group that the program makes in other threads."""
    digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
    return Group(session, ranks, f"bpsfast.islands/{what}/{digest}", session.settings.timeout_s)


def _decide(here: list[_Member], settings: Settings) -> _Decided:
    try:
        return _Decided(_routes(here, settings))
    except BpsError as exc:
        return _Decided(error=type(exc).__name__, reason=str(exc))


def _routes(here: list[_Member], settings: Settings) -> IslandRoutes:
    if not here[0].gpu:  # host devices, whose topology has no cards
        found = routes_of(strategy_of(of_host(len(here)), msgspec.structs.replace(settings, gpu_direct=False)),
                          {f"gpu{number}": member.rank for number, member in enumerate(here)})
        return _with_one_root(found, here, settings) if settings.gpu_direct else found
    if len({member.gpu for member in here}) < len(here):
        if settings.gpu_direct:
            raise ConfigError("BPSFAST_GPU_DIRECT is on, but ranks of this machine share GPUs, and each of them copies "
                              "its part of the sum. Give each rank a GPU of its own, or set it to off")
        log.info("ranks of this machine share GPUs: those of one GPU sum on it, the node sums the rest")
        return shared_routes([(member.rank, member.gpu) for member in here])
    topology = discovery.discover(None)
    name_of = {part.address.lower(): part.name for part in topology.of(PartKind.GPU)}
    unknown = [member.gpu for member in here if member.gpu not in name_of]
    if unknown:
        raise ConfigError(f"the GPUs at {', '.join(unknown)} are not among those that sysfs shows "
                          f"({', '.join(name_of)}); a container may hide them. Set BPSFAST_ISLANDS=off")
    used = with_gpus(topology, [name_of[member.gpu] for member in here])
    strategy = strategy_of(used, settings)
    for line in strategy.lines():
        log.info("%s", line)
    found = routes_of(strategy, {name_of[member.gpu]: member.rank for member in here})
    return _with_one_root(found, here, settings) if settings.gpu_direct else found


def _with_one_root(found: IslandRoutes, here: Sequence[_Member], settings: Settings) -> IslandRoutes:
    """Return *found* if the one rank that *settings* name has the sum of all ranks *here*, as GPUDirect needs it."""
    everybody = tuple(sorted(member.rank for member in here))
    roots = {root for route in found.routes for island in route.roots for root, _ in island}
    islands = {tuple(sorted(island)) for route in found.routes for island in route.islands}
    wanted = {member.rank for member in here if str(member.local_rank) == settings.reduce_roots}
    if islands != {everybody} or roots != wanted:
        raise ConfigError(f"BPSFAST_GPU_DIRECT is on, but the ranks {everybody} of this machine sum in the islands "
                          f"{sorted(islands)} with the roots {sorted(roots)}. Set BPSFAST_REDUCE_ROOTS to one "
                          f"local rank, now {settings.reduce_roots or 'by topology'}, whose GPU has that place in the "
                          "order of addresses on PCIe")
    return found


def _address(device: Device) -> str:
    return device.address if isinstance(device, CudaDevice) else ""
