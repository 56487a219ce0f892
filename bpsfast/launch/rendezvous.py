"""Form a job of ranks that have only their number and a key-value store, such as ranks of a torch process group.

A process group of torch gives its backend a store, a rank and a size; the environment may be empty. So

    each rank   publishes its machine, an address for the others, and what its settings require
    rank 0      reads all, numbers the nodes, chooses the scheduler's address on its own machine, binds the port,
                and publishes one table (or an error)
    each rank   reads the table

MASTER_ADDR does not matter: rank 0 need not be there. Two jobs never mix, since ports are bound before they are
published and each table has its own nonce. Ranks share a machine if they share its boot and its network namespace,
which is how far a node's local socket reaches.

No secret travels through the store, which every machine can read. The job's key is derived from the table's nonce and
from what all ranks have already: the given key (BPSFAST_JOB_KEY), or, on one machine, this user's `machine_secret`.
Ranks on several machines without a given key are refused. With BPSFAST_INSECURE=1 rank 0 draws a key and publishes it.
"""
from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec

from ..base.addresses import any_host, configured_host, default_route_host, is_loopback, route_source
from ..base.job_key import check_insecure, given_key, job_key, local_key, machine_secret
from ..base.process_identity import network_id
from ..base.settings import Settings, format_addresses, parse_addresses
from ..orchestration import errors, security
from ..orchestration.errors import BpsError, ConfigError, MismatchError, PeerLostError, StallError
from .daemons import reserve_port
from .process_role import ProcessRole

log = logging.getLogger("bpsfast.roles")

_LOOPBACK = "127.0.0.1"
#: Timeout to check whether a key is there. Stores take 0 as "no deadline", and count milliseconds.
_LOOK = timedelta(milliseconds=20)
#: Stores may give up a little before their timeout.
_EARLY_S = 0.2
_MOST_NAMES = 8
#: The other ranks wait a little longer for rank 0's table, so that they raise its reason.
_GRACE_S = 2.0


class Store(Protocol):
    """A key-value store of all ranks, such as torch's. `get` and `wait` block until the keys are there."""

    def set(self, key: str, value: str, /) -> None:
        """Set *key*."""

    def get(self, key: str, /) -> bytes:
        """Return the value of *key*."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all *keys* are set; raise an error of the store's own at the deadline."""

    def add(self, key: str, amount: int, /) -> int:
        """Add *amount* to the counter *key*, which begins at 0, and return it."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes about itself.

    `machine` identifies the boot, the network namespace and the node id. `key_proof` identifies the given key, "" if
    none; `secret_proof` the `machine_secret` that the rank has otherwise.
    """

    size: int
    machine: str
    host: str
    key_proof: str
    secret_proof: str


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 publishes for all. `nodes`: the ranks of each. `job_key` (hex): "" unless BPSFAST_INSECURE=1."""

    nodes: tuple[tuple[int, ...], ...] = ()
    scheduler: str = ""
    num_helpers: int = 0
    expects_helpers: bool = False
    nonce: str = ""
    job_key: str = ""
    error: str = ""
    reason: str = ""


_Said = TypeVar("_Said", _Entry, _Table)


def role_of(store: Store, rank: int, size: int, settings: Settings, timeout_s: float,
          environ: Mapping[str, str] | None = None) -> ProcessRole:
    """Return the role of *rank* in a new job of *size* ranks, all of which call this with the same store.

    The n-th calls of all ranks with one store belong together: a store may be used again after its job has ended. Rank
    0's settings BPSFAST_SCHEDULER (where its scheduler listens; else it is chosen here) and BPSFAST_NUM_HELPERS apply
    to the whole job.

    Raises `StallError` if some ranks did not publish in time; the text names them. `ConfigError` or `MismatchError` if
    the ranks contradict each other, or no address is known: the same error on all ranks. `PeerLostError` if the store
    failed.

    *timeout_s* is the deadline of the rendezvous; that of *settings* is for what follows. *environ*, `os.environ` if
    None, has MASTER_ADDR, a hint where the other machines may be.

    Rank 0's role holds the scheduler's port (`ProcessRole.reserved`): give it to `daemons.start`, or close that socket.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank = {rank} must be at least 0 and less than the size of the job, {size}")
    environ = os.environ if environ is None else environ
    deadline = time.monotonic() + timeout_s
    given = given_key(settings)
    key = security.job_key(given, "") if given else b""
    secret = b"" if given else _own_secret()
    session = _StoreSession(store, rank, size, timeout_s, deadline)
    session.publish(_Entry(size=size, machine=f"{network_id()} {settings.node_id}", host=_own_host(settings, environ),
                           key_proof=_proof(key), secret_proof=_proof(secret)))
    if rank == 0:
        if settings.rank >= 0:  # the scheduler and helpers of these settings belong to a launcher's job
            settings = msgspec.structs.replace(settings, scheduler="", num_helpers=0, max_helpers=0)
        return _lead(session, settings, key, secret)
    table = session.table()
    if table.error:
        raise errors.error_of(table.error, f"{table.reason} (found by rank 0)")
    if table.job_key and (key or not settings.insecure):
        raise MismatchError("the job's key is in the ranks' store, where every machine can read and change it, and "
                            f"this rank ({rank}) is not to accept that: set BPSFAST_INSECURE=1 on all ranks or on "
                            "none, or BPSFAST_JOB_KEY")
    if sum(map(len, table.nodes)) != size:
        raise _other_size(sum(map(len, table.nodes)), rank, size)
    return _role(session, table, settings, key or secret, parse_addresses(table.scheduler, "rank 0's store entry"))


class _StoreSession:
    """One rank's view of one rendezvous in a store."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, deadline: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout_s, self._deadline = store, timeout_s, deadline
        try:
            self._number = store.add(f"bpsfast/joined/{rank}", 1)
        except Exception as exc:
            raise self._lost(exc) from exc

    def publish(self, value: _Entry | _Table) -> None:
        """Publish this rank's entry, or rank 0's table."""
        key = self._table_key if isinstance(value, _Table) else self._key_of(self.rank)
        try:
            self._store.set(key, msgspec.json.encode(value).decode())
        except Exception as exc:
            raise self._lost(exc) from exc

    def entries(self) -> list[_Entry]:
        """Return the entries of all ranks, by rank."""
        found = []
        for rank in range(self.size):
            data = self._get(self._key_of(rank), self._deadline)
            if data is None:
                raise self._missing()
            found.append(_decoded(data, _Entry, rank))
        return found

    def table(self) -> _Table:
        """Return rank 0's table."""
        data = self._get(self._table_key, self._deadline + _GRACE_S)
        if data is None:
            raise self._missing()
        return _decoded(data, _Table, 0)

    @property
    def _table_key(self) -> str:
        return f"bpsfast/{self._number}/table"

    def _key_of(self, rank: int) -> str:
        return f"bpsfast/{self._number}/rank/{rank}"

    def _get(self, key: str, deadline: float) -> bytes | None:
        """Return the value of *key*, None if it is not there at the deadline."""
        left = timedelta(seconds=deadline - time.monotonic())
        try:
            self._store.wait([key], max(left, _LOOK))
            return bytes(self._store.get(key))
        except Exception as exc:  # each kind of store has errors of its own
            if time.monotonic() < deadline - _EARLY_S:
                raise self._lost(exc) from exc
            return None

    def _missing(self) -> StallError:
        """Return the error that names the absent ranks; after the deadline."""
        absent: list[int] = []
        for rank in range(self.size):
            if len(absent) <= _MOST_NAMES and self._get(self._key_of(rank), 0.0) is None:
                absent.append(rank)
        again = f" for the {self._number}. time" if self._number > 1 else ""
        within = f"within {self._timeout_s:g} s"
        if not absent:
            return StallError(f"all {self.size} ranks have come to the store{again}, but rank 0 has not said {within} "
                              "where its scheduler is: see its output")
        shown = ", ".join(map(str, absent[:_MOST_NAMES])) + (" and others" if len(absent) > _MOST_NAMES else "")
        who = f"rank {shown} of {self.size} has" if len(absent) == 1 else f"ranks {shown} of {self.size} have"
        return StallError(f"{who} not come to the store{again} {within}: not started, ended, or with another store, "
                          "rank or size")

    def _lost(self, exc: Exception) -> PeerLostError:
        text = next(iter(str(exc).strip().splitlines()), "no text")  # torch's messages continue with code addresses
        return PeerLostError(f"rank {self.rank} of {self.size} cannot go on: the store by which the ranks find each "
                             f"other failed ({type(exc).__name__}: {text})")


def _proof(key: bytes) -> str:
    """Return a value by which keys can be compared and not found out; "" for no key."""
    return security.prove(key, "store").hex() if key else ""


def _own_secret() -> bytes:
    """Return this user's secret on this machine, b"" if there is none: rank 0 decides what follows."""
    try:
        return machine_secret()
    except ConfigError as exc:
        log.info("%s", exc)
        return b""


def _lead(session: _StoreSession, settings: Settings, key: bytes, secret: bytes) -> ProcessRole:
    """Act as rank 0: read all entries, decide, publish the table."""
    try:
        entries = session.entries()
        _check_agree(entries)
        nodes = _nodes(entries)
        reserved, addresses = None, _given_scheduler(settings)
        if not addresses:
            host = _scheduler_host(entries, settings)
            reserved = reserve_port(host if is_loopback(host) else any_host())  # as the scheduler will bind it
            addresses = [(host, reserved.getsockname()[1])]
        elif any(is_loopback(host) for host, _ in addresses) and len(_machines(entries)) > 1:
            raise ConfigError(f"BPSFAST_SCHEDULER = {settings.scheduler} cannot be reached from the other machines: "
                              "name an address of rank 0's machine that can, or leave it out")
        drawn = b"" if key else _drawn_key(entries, settings, addresses)
    except BpsError as exc:
        with contextlib.suppress(PeerLostError):  # the store has failed, for the other ranks, too
            session.publish(_Table(error=type(exc).__name__, reason=str(exc)))
        raise
    try:
        table = _Table(nodes=nodes, scheduler=format_addresses(addresses), num_helpers=settings.num_helpers,
                       expects_helpers=settings.expects_helpers, nonce=secrets.token_hex(8), job_key=drawn.hex())
        found = _role(session, table, settings, key or secret, addresses)
        session.publish(table)
    except BaseException:
        if reserved is not None:
            reserved.close()
        raise
    return msgspec.structs.replace(found, starts_scheduler=True, reserved=reserved)


def _role(session: _StoreSession, table: _Table, settings: Settings, key: bytes,
          schedulers: Sequence[tuple[str, int]]) -> ProcessRole:
    index, ranks = next((index, ranks) for index, ranks in enumerate(table.nodes) if session.rank in ranks)
    if table.job_key:
        job = bytes.fromhex(table.job_key)
    elif table.expects_helpers:  # they have no nonce
        job = local_key(settings, format_addresses(schedulers[:1]))
    elif key:
        job = security.prove(key, "store", table.nonce)
    else:
        raise ConfigError(f"rank {session.rank} has no job key, and no secret of this user on its machine, though "
                          "rank 0 has one: set BPSFAST_JOB_KEY to the same random hex on all ranks (openssl rand "
                          "-hex 32)")
    return ProcessRole(launcher="store", role="rank", rank=session.rank, size=session.size,
                       local_rank=ranks.index(session.rank), local_size=len(ranks), node_index=index,
                       node_id=f"{settings.node_id}-{table.nonce}", num_nodes=len(table.nodes),
                       num_helpers=table.num_helpers, scheduler=schedulers[0],
                       next_schedulers=tuple(schedulers[1:]), starts_node=session.rank == ranks[0], job_key=job)


def _decoded(data: bytes, kind: type[_Said], rank: int) -> _Said:
    try:
        return msgspec.json.decode(data, type=kind)
    except errors.DECODE_ERRORS as exc:
        raise MismatchError(f"what rank {rank} has left in the store cannot be read ({exc}): it has another version of "
                            "bpsfast") from exc


def _own_host(settings: Settings, environ: Mapping[str, str]) -> str:
    """Return the address by which others most likely reach this rank, "" if it has none.

    If MASTER_ADDR is a name of this machine, it may mean the loopback. Rank 0, which then knows the others, uses
    `_scheduler_host`.
    """
    host = settings.advertise or configured_host(settings) or route_source(environ.get("MASTER_ADDR", ""))
    return host if host and not is_loopback(host) else default_route_host()


def _check_agree(entries: Sequence[_Entry]) -> None:
    first = entries[0]
    for rank, entry in enumerate(entries):
        if entry.size != first.size:
            raise _other_size(first.size, rank, entry.size)
        if entry.key_proof != first.key_proof:
            which = "different ones" if entry.key_proof and first.key_proof else (
                f"only rank {rank if entry.key_proof else 0} has one")
            raise MismatchError(f"rank 0 and rank {rank} must be given the same BPSFAST_JOB_KEY, or none: {which}")


def _other_size(size: int, rank: int, theirs: int) -> MismatchError:
    return MismatchError(f"rank 0 says that the job has {size} ranks, rank {rank} says {theirs}")


def _nodes(entries: Sequence[_Entry]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, ordered by the nodes' first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        nodes.setdefault(entry.machine, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def _machines(entries: Sequence[_Entry]) -> dict[str, str]:
    """Return an address of each machine; nodes that differ only in BPSFAST_NODE_ID share a machine."""
    machines: dict[str, str] = {}
    for entry in entries:
        machines.setdefault(" ".join(entry.machine.split(" ")[:2]), entry.host)
    return machines


def _given_scheduler(settings: Settings) -> list[tuple[str, int]]:
    if settings.scheduler:
        return parse_addresses(settings.scheduler)
    if settings.expects_helpers:
        name, number = ("NUM", settings.num_helpers) if settings.num_helpers else ("MAX", settings.max_helpers)
        raise ConfigError(f"BPSFAST_{name}_HELPERS = {number}, but helpers cannot read the store: set "
                          "BPSFAST_SCHEDULER to an address of rank 0's machine, on all ranks and helpers")
    return []


def _scheduler_host(entries: Sequence[_Entry], settings: Settings) -> str:
    """Return an address of rank 0's machine for the other machines."""
    own, *others = _machines(entries).items()
    if not others:
        return _LOOPBACK
    host = settings.advertise or configured_host(settings) or next(
        (found for found in (route_source(host) for _, host in others if host) if found and not is_loopback(found)),
        own[1])
    if not host:
        raise ConfigError(f"the ranks are on {len(others) + 1} machines, but rank 0's has no address that the others "
                          "could reach: set BPSFAST_NODE_HOST there")
    return host


def _drawn_key(entries: Sequence[_Entry], settings: Settings, schedulers: Sequence[tuple[str, int]]) -> bytes:
    """Return a key to publish if the ranks share no secret and need none (BPSFAST_INSECURE=1); else an empty one.

    With helpers, it is the key that they derive, too.
    """
    proofs = {entry.secret_proof for entry in entries}
    is_local = all(is_loopback(host) for host, _ in schedulers) or (
        len(_machines(entries)) == 1 and not settings.expects_helpers)
    if is_local and len(proofs) == 1 and proofs != {""}:
        return b""
    check_insecure(settings, "or reads the ranks' store could join the job" + (
        " (its ranks are on one machine, but of several users or containers, or have no folder for a secret)"
        if is_local else ""))
    return job_key(settings, format_addresses(schedulers)) if settings.expects_helpers else secrets.token_bytes(32)
