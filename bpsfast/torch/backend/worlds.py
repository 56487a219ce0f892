"""The sessions behind process groups: each made by the first group of its ranks, shared by groups among them.

The default group makes one of all ranks, through torch's store, so that no address but the store's must be known; under
``bpsfast run``, or after `bpsfast.init()`, it is the job that is there already. It ends with its last group.
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
from ...base.addresses import format_address
from ...base.settings import load, parse_address
from ...launch import rendezvous, roles
from ...orchestration.errors import ClosedError, ConfigError, MismatchError
from ...trainer import process
from ...trainer.exit_handling import ExitWatch
from ...trainer.process import join_job, leave_job
from ...trainer.session import Session


class World:
    """A session whose rank i is rank ``ranks[i]`` of torch's default group."""

    def __init__(self, session: Session, ranks: Sequence[int], watch: ExitWatch | None) -> None:
        self.session = session
        self.ranks = tuple(ranks)
        self.n_groups = 0
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups
        self._watch = watch  # None: whoever made the session ends it

    @property
    def is_open(self) -> bool:
        """Whether groups can be made here."""
        return not self.session.closed and self.session.pid == os.getpid()

    def session_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Return what the session calls *ranks* of the default group."""
        return [self.ranks.index(rank) for rank in ranks]

    def close(self) -> None:
        """End the session if this made it; the daemons end once all ranks have."""
        if self._watch is not None:
            process.forget(self.session)
            leave_job(self.session, self._watch, stays=False)


_worlds: list[World] = []
_lock = threading.Lock()


def enter(store: Any, rank: int, size: int, global_ranks: Sequence[int], timeout_s: float) -> World:
    """Return the world for a new group of *global_ranks* (empty: all), made by all of them with the same *store*.

    `quit` gives it back. Raises what `rendezvous.role_of` and `join_job` raise.
    """
    is_default = not global_ranks
    if is_default:
        _end_stale_resources()
    with _lock:
        _worlds[:] = [world for world in _worlds if world.is_open]
        ranks = range(size) if is_default else global_ranks
        # Groups are made in one order on all their members, and a world was made by all its ranks: all find the same.
        world = next((each for each in _worlds if set(ranks) <= set(each.ranks)), None)
        if world is None:
            world = _present(rank, size)
            if world is None:
                world = _make(store, rank, size, ranks, timeout_s)
                if is_default:  # a session of some ranks is not what `bpsfast.init()` means
                    process.adopt(world.session)
            _worlds.append(world)
        world.n_groups += 1
        return world


def make(store: Any, rank: int, size: int, timeout_s: float) -> World:
    """Make a world for one group of *size* ranks, whatever else this process takes part in; `quit` ends it.

    Raises what `rendezvous.role_of` and `join_job` raise.
    """
    world = _make(store, rank, size, range(size), timeout_s)
    world.n_groups = 1
    return world


def end_with_torchs_groups() -> None:
    """Let `destroy_process_group` end our groups in versions of torch that tell only NCCL's groups of it (before 2.4).

    A program that has taken the function's name out of torch's module before keeps torch's own; its groups end when the
    default group is made again, or with the process.
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
        return [group for world in _worlds if world.is_open for group in list(world.members)]


def _end_stale_resources() -> None:
    """End what older versions of torch leave behind when the default group is destroyed (`end_with_torchs_groups`)."""
    for group in _groups():
        group.shutdown()


def quit(world: World) -> None:
    """Say that one group fewer uses *world*; the last one ends it."""
    with _lock:
        world.n_groups -= 1
        is_last = world.n_groups == 0
        if is_last and world in _worlds:
            _worlds.remove(world)
    if is_last:
        world.close()


def _present(rank: int, size: int) -> World | None:
    """Return the world of the job that this process is a rank of already, or that its launcher has made for it."""
    session = process.session()
    if session is None:
        settings = load({})
        if settings.rank < 0 or (settings.rank, settings.size) != (rank, size):
            return None
        logs.configure(settings.log_level, "rank")
        place = roles.detect(settings)
        if place.starts_scheduler:  # nobody has: nothing is gained by it
            return None
        process.begin(place, settings)
        session = process.current()
    if session.size != size:
        return None
    if session.rank != rank:
        raise ConfigError(f"this process is rank {session.rank} of {session.size} of bpsfast's job, but torch's "
                          f"process group is made with rank {rank}: give both the same")
    return World(session, range(size), None)


def _make(store: Any, rank: int, size: int, ranks: Sequence[int], timeout_s: float) -> World:
    settings = load({})
    logs.configure(settings.log_level, "rank")
    place = rendezvous.role_of(store, rank, size, settings, min(timeout_s, settings.start_timeout_s))
    session, started = join_job(place, settings)
    logs.set_identity(f"rank {ranks[session.rank]}", session.job)
    world: World

    def end() -> None:
        world.close()

    watch = ExitWatch(end, started)
    world = World(session, ranks, watch)
    return world


Handler = Callable[..., Iterator[tuple[Any, int, int]]]
_NOTICE = "torch/store"


def env(torchs: Handler) -> Handler:
    """Handle ``env://`` under launchers that do not set torch's variables: ``bpsfast run``, Slurm, MPI, BytePS's.

    Where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set, but bpsfast knows this process's rank from another
    launcher's variables (`launch.roles`), it joins that job, and rank 0's process holds the store that torch wants.

    Return what torch is to ask for ``env://`` in place of its own handler *torchs*, which serves whenever it can.

    It raises `MismatchError` where the program says another world_size than the launcher.
    """

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[tuple[Any, int, int]]:
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

    return handler


def _is_served_by_torch(given: dict[str, str]) -> bool:
    """Whether torch's variables are there, and a world_size that is *given* is theirs."""
    size = os.environ.get("WORLD_SIZE", "")
    return given.get("world_size", size) == size and all(
        os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _is_in_job(given: dict[str, str]) -> bool:
    """Join the job whose rank this process is by another launcher's word; return False if there is none, or if this
    process has left it and torch's variables are there.

    Raises what `bpsfast.init` raises.
    """
    if process.session() is None:
        settings = load({})
        logs.configure(settings.log_level, "rank")
        place = roles.detect(settings)
        if place.launcher == "single":
            return False
        try:
            process.begin(place, settings)
        except ClosedError:
            if _is_served_by_torch(given):
                return False
            raise
    return True


def _store_numbers(session: Session) -> Iterator[int]:
    """Return a count of the stores of *session* (`Session.extension`)."""
    return itertools.count()


def store_of(session: Session, timeout: timedelta) -> Any:
    """Return a store that all ranks of *session* share; rank 0's process holds it. All ranks call this equally often.

    Raises
    ------
    StallError
        If rank 0 does not come within *timeout*.
    """
    number = next(session.extension(_store_numbers))
    key = f"{_NOTICE}/{number}"
    if session.rank == 0:
        host = session.host
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        session.key_values.publish(key, format_address(host, store.port).encode())
        return store
    found = session.key_values.lookup(key, timeout.total_seconds(), "rank 0").decode()
    host, port = parse_address(found, "rank 0")
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
