"""The sessions behind torch process groups: the first group of some ranks makes one, later groups among them share it.

The default group makes a session of all ranks through torch's store, so that no other address is needed. Under
``bpsfast run``, or after `bpsfast.init()`, it uses the existing job. A session ends with its last group.
"""
from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...base import logs
from ...base.settings import load, parse_address
from ...base.value_formats import parse_ports
from ...launch import rendezvous, roles
from ...orchestration.errors import ClosedError, ConfigError, MismatchError
from ...orchestration.host_lookup import format_address
from ...trainer import process
from ...trainer.exit_handling import ExitWatch
from ...trainer.process import join_job, leave_job
from ...trainer.session import Session


class World:
    """A session whose rank i is rank ``ranks[i]`` of torch's default group."""

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self.session = session
        self.ranks = tuple(ranks)
        self.n_groups = 0
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.watch: ExitWatch | None = None  # set if the session was made for this world, which then ends it

    @property
    def is_open(self) -> bool:
        return not self.session.closed and self.session.pid == os.getpid()

    def close(self) -> None:
        """End the session if it was made for this world; the daemons end once all ranks have."""
        if self.watch is not None:
            process.forget(self.session)
            leave_job(self.session, self.watch, stays=False)


_worlds: list[World] = []
_lock = threading.Lock()


def enter(store: Any, rank: int, size: int, global_ranks: Sequence[int], timeout_s: float) -> World:
    """Return the world for a new group of *global_ranks* (empty: all), made by all of them with the same *store*.

    `quit` leaves it. Raises as `rendezvous.role_of` and `join_job`.
    """
    is_default = not global_ranks
    if is_default:  # older versions of torch leave groups behind when the default group is destroyed
        for group in _groups():
            group.shutdown()
    with _lock:
        _worlds[:] = [world for world in _worlds if world.is_open]
        ranks = range(size) if is_default else global_ranks
        # Groups are made in one order on all their members, and a world was made by all its ranks: all find the same.
        world = next((each for each in _worlds if set(ranks) <= set(each.ranks)), None)
        if world is None:
            world = _present(rank, size)
            if world is None:
                world = _make(store, rank, size, ranks, timeout_s)
                if is_default:  # only a session of all ranks can be the one of `bpsfast.init()`
                    process.adopt(world.session)
            _worlds.append(world)
        world.n_groups += 1
        return world


def make(store: Any, rank: int, size: int, timeout_s: float) -> World:
    """Make a world for one group of *size* ranks, beside other sessions of this process; `quit` ends it.

    Raises as `rendezvous.role_of` and `join_job`.
    """
    world = _make(store, rank, size, range(size), timeout_s)
    world.n_groups = 1
    return world


def end_with_torchs_groups() -> None:
    """Make `destroy_process_group` end bpsfast's groups in torch before 2.4, which tells only NCCL's groups.

    A program that has imported the function by name before keeps torch's own; its groups end when the default group is
    made again, or with the process.
    """
    if hasattr(dist.ProcessGroup, "shutdown"):
        return
    torchs = distributed_c10d.destroy_process_group

    @functools.wraps(torchs)
    def destroy_process_group(group: Any = None) -> None:
        is_default = group is None or group is dist.group.WORLD
        for each in [ours for ours in _groups() if is_default or ours is group]:
            each.shutdown()
        torchs(group)

    distributed_c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


def _groups() -> list[Any]:
    """Return our process groups that have not ended."""
    with _lock:
        return [group for world in _worlds if world.is_open for group in list(world.groups)]


def quit(world: World) -> None:
    """Leave *world* on behalf of one group; the last group ends it."""
    with _lock:
        world.n_groups -= 1
        is_last = world.n_groups == 0
        if is_last and world in _worlds:
            _worlds.remove(world)
    if is_last:
        world.close()


def _present(rank: int, size: int) -> World | None:
    """Return the world of the job that this process belongs to, or that its launcher has made for it, if any."""
    session = process.session()
    if session is None:
        settings = load({})
        if settings.rank < 0 or (settings.rank, settings.size) != (rank, size):
            return None
        logs.configure(settings.log_level, "rank")
        role = roles.detect(settings)
        if role.starts_scheduler:  # no launcher has made a job
            return None
        process.begin(role, settings)
        session = process.current()
    if session.size != size:
        return None
    if session.rank != rank:
        raise ConfigError(f"this process is rank {session.rank} of {session.size} of bpsfast's job, but torch's "
                          f"process group is made with rank {rank}: give both the same")
    return World(session, range(size))


def _make(store: Any, rank: int, size: int, ranks: Sequence[int], timeout_s: float) -> World:
    settings = load({})
    logs.configure(settings.log_level, "rank")
    role = rendezvous.role_of(store, rank, size, settings, min(timeout_s, settings.start_timeout_s))
    session, started = join_job(role, settings)
    logs.set_identity(f"rank {ranks[session.rank]}", session.job)
    world = World(session, ranks)
    world.watch = ExitWatch(world.close, started)
    return world


def env(torchs: Callable[..., Any], url: str, timeout: timedelta = timedelta(minutes=30),
        **more: Any) -> Iterator[tuple[Any, int, int]]:
    """Handle ``env://`` instead of torch's handler *torchs*, which is called whenever torch's variables are set.

    If RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set, but another launcher (``bpsfast run``, Slurm, MPI,
    BytePS's) has set variables that give this process's rank (`launch.roles`), it joins that job, and rank 0's process
    holds the store that torch needs. Raises `MismatchError` if the program gives another world_size than the launcher.
    """
    given = dict(parse_qsl(urlsplit(url).query))  # arguments of init_process_group
    if "rank" in given or not _is_in_job(given):
        yield from torchs(url, timeout=timeout, **more)
        return
    session = process.current()
    if given.get("world_size", str(session.size)) != str(session.size):
        raise MismatchError(f"init_process_group is given world_size={given['world_size']}, but the launcher has "
                            f"started {session.size} ranks: leave it out, or start as many")
    yield store_of(session, timeout), session.rank, session.size
    raise RuntimeError("the ranks of a job of bpsfast do not change: env:// cannot be asked again")


def _is_in_job(given: dict[str, str]) -> bool:
    """Join the job of another launcher, as its variables say; return False if there is none, or if this process has
    left it and torch's variables are set and agree with the *given* world_size. Raises as `bpsfast.init`.
    """
    if process.session() is None:
        settings = load({})
        logs.configure(settings.log_level, "rank")
        role = roles.detect(settings)
        if role.launcher == "single":
            return False
        try:
            process.begin(role, settings)
        except ClosedError:
            names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if all(map(os.environ.get, names)) and given.get("world_size") in (None, os.environ["WORLD_SIZE"]):
                return False
            raise
    return True


def _store_numbers(session: Session) -> Iterator[int]:
    """Return a count of the stores of *session* (`Session.extension`)."""
    return itertools.count()


def _listening_store(session: Session, timeout: timedelta) -> Any:
    """Return rank 0's store, at the first free one of the ports that the settings allow."""
    first, last = parse_ports(session.settings.ports)
    for port in range(first, last + 1):
        try:
            return dist.TCPStore(session.host, port, is_master=True, timeout=timeout, wait_for_workers=False)
        except dist.DistNetworkError as exc:
            if port == last or "EADDRINUSE" not in str(exc):
                raise
    raise AssertionError("a range has at least one port")


def store_of(session: Session, timeout: timedelta) -> Any:
    """Return a store that all ranks of *session* share; rank 0's process holds it. All ranks call this equally often.

    Raises `StallError` if rank 0 does not call it within *timeout*.
    """
    key = f"torch/store/{next(session.extension(_store_numbers))}"
    if session.rank == 0:
        store = _listening_store(session, timeout)
        host = session.settings.advertise or session.host
        session.key_values.publish(key, format_address(host, store.port).encode())
        return store
    found = session.key_values.lookup(key, timeout.total_seconds(), "rank 0").decode()
    host, port = parse_address(found, "rank 0")
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
