"""How the ranks of this machine come to the same routes: each says which GPU it has, the first one decides."""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..gpu.device import Device
from ..gpu.host import HostDevice
from ..hardware.topology import discovery
from ..hardware.topology.decision import strategy_of
from ..hardware.topology.graph import PartKind, of_host, with_gpus
from ..orchestration.errors import BpsError, ConfigError, error_of
from .group import Group, all_gather_bytes, broadcast_bytes
from .island_routes import IslandRoutes, routes, shared_routes

if TYPE_CHECKING:
    from ..base.settings import Settings
    from ..trainer.session import Session

log = logging.getLogger("bpsfast.gpu")


class _Member(msgspec.Struct, frozen=True):
    """A rank, its node and its GPU's address on PCIe; "": it has the host for a device."""

    rank: int
    node: int
    local_rank: int
    gpu: str


class _Decided(msgspec.Struct, frozen=True):
    routes: IslandRoutes | None = None
    error: str = ""
    reason: str = ""


def agree(session: Session, device: Device) -> IslandRoutes:
    """Return the routes of this machine, whose ranks have one device each, this one *device*. Collective: all ranks of
    the job.

    Raises
    ------
    ConfigError
        On all ranks of the machine, if settings ask for what it has not.
    StallError, PeerLostError
        If a rank does not come in time, or is gone.
    """
    own = _Member(session.rank, session.node, session.local_rank, _address(device))
    everybody = island_group(session, range(session.size), "devices")
    told = [msgspec.msgpack.decode(said, type=_Member) for said in all_gather_bytes(everybody,
                                                                                  msgspec.msgpack.encode(own))]
    everybody.close()
    here = sorted((member for member in told if member.node == session.node), key=lambda member: member.local_rank)
    if len(here) == 1:
        return IslandRoutes(())
    group = island_group(session, [member.rank for member in here], "routes")
    said = msgspec.msgpack.encode(_decide(here, session.settings)) if group.rank == 0 else b""
    decided = msgspec.msgpack.decode(broadcast_bytes(group, said, 0), type=_Decided)
    group.close()
    if decided.routes is None:
        raise error_of(decided.error, decided.reason)
    return decided.routes


def island_group(session: Session, ranks: Sequence[int], what: str) -> Group:
    """Return a group of *ranks* for *what*: of these, whatever groups the program makes meanwhile in other threads."""
    digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
    return Group(session, ranks, f"bpsfast.islands/{what}/{digest}", session.settings.timeout_s)


def _decide(here: list[_Member], settings: Settings) -> _Decided:
    try:
        return _Decided(_routes(here, settings))
    except BpsError as exc:
        return _Decided(error=type(exc).__name__, reason=str(exc))


def _routes(here: list[_Member], settings: Settings) -> IslandRoutes:
    if not here[0].gpu:  # which has no cards in its topology
        found = routes(strategy_of(of_host(len(here)), msgspec.structs.replace(settings, gpu_direct=False)),
                       {f"gpu{place}": member.rank for place, member in enumerate(here)})
        return _with_one_root(found, here, settings) if settings.gpu_direct else found
    if len({member.gpu for member in here}) < len(here):
        if settings.gpu_direct:
            raise ConfigError("BPSFAST_GPU_DIRECT is on, but ranks of this machine share GPUs, and each of them copies "
                              "its part of the sum: give each a GPU of its own, or set it to off")
        log.info("ranks of this machine share GPUs: those of one GPU sum among themselves, memory adds the rest")
        return shared_routes([(member.rank, member.gpu) for member in here])
    topology = discovery.discover(None)
    name_of = {part.address.lower(): part.name for part in topology.of(PartKind.GPU)}
    unknown = [member.gpu for member in here if member.gpu not in name_of]
    if unknown:
        raise ConfigError(f"the GPUs at {', '.join(unknown)} are not among those that sysfs shows "
                          f"({', '.join(name_of)}): set BPSFAST_ISLANDS=off (a container may hide them)")
    used = with_gpus(topology, [name_of[member.gpu] for member in here])
    strategy = strategy_of(used, settings)
    for line in strategy.lines():
        log.info("%s", line)
    found = routes(strategy, {name_of[member.gpu]: member.rank for member in here})
    return _with_one_root(found, here, settings) if settings.gpu_direct else found


def _with_one_root(found: IslandRoutes, here: Sequence[_Member], settings: Settings) -> IslandRoutes:
    """Return *found* if one rank has the sum of all that are *here*, as *settings* say: only that can go straight to a
    card.
    """
    everybody = tuple(sorted(member.rank for member in here))
    roots = {root for road in found.roads for island in road.roots for root, _ in island}
    islands = {tuple(sorted(island)) for road in found.roads for island in road.islands}
    wanted = {member.rank for member in here if str(member.local_rank) == settings.reduce_roots}
    if islands != {everybody} or roots != wanted:
        raise ConfigError(f"BPSFAST_GPU_DIRECT is on, but the ranks {everybody} of this machine sum in the islands "
                          f"{sorted(islands)} with the roots {sorted(roots)}: set BPSFAST_REDUCE_ROOTS to one "
                          f"local rank, now {settings.reduce_roots or 'by topology'}, whose GPU has that place in the "
                          "order of addresses on PCIe")
    return found


def _address(device: Device) -> str:
    if isinstance(device, HostDevice):
        return ""
    from ..gpu.cuda import CudaDevice

    assert isinstance(device, CudaDevice), f"{device.name} is of no known kind"
    return device.address
