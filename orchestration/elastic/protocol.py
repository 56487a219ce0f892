"""The messages between the workers of an elastic job and their coordinator, over a `group_channel`.

The channel also carries a key-value store for each job, by which the members of the next job find each other
(`bpsfast.launch.rendezvous`).
"""
from __future__ import annotations

import msgspec

from ..priority.group_channel import FollowerChannel as FollowerChannel, Hello as Hello, LeaderChannel as LeaderChannel

#: Limits of the store, so that a member cannot fill the launcher's memory: of all values of a job, of one value with
#: its key, of keys that are awaited, and of their characters.
MOST_STORED_NBYTES = 16 << 20
MOST_VALUE_NBYTES = 1 << 20
MOST_WANTED = 1 << 12
MOST_KEY_LENGTH = 256
#: Interval at which waiting members hear that the coordinator lives.
WORD_EVERY_S = 2.0


class Come(msgspec.Struct, tag=True, frozen=True):
    """A worker has no job (any more), and waits for the next one. `node`: ranks with the same value share a node.

    `has_state`: it has the state of a job before, which has had `n_commits` commits. `reason`: why that job has failed,
    "" if it has not. `is_ready`: it may be let into a running job at once; if not, the answer is a `Wait` that
    `prepares`. `lost`: the ranks that its last job went on without.
    """

    member: int
    node: str
    has_state: bool = False
    n_commits: int = 0
    reason: str = ""
    is_ready: bool = True
    lost: tuple[int, ...] = ()


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """A worker that was told to prepare itself (`Wait.prepares`) is ready to be let into a running job."""

    member: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """A worker tells that its training has ended, and that of all other ranks of its job except those it has `lost`."""

    member: int
    lost: tuple[int, ...] = ()


class Put(msgspec.Struct, tag=True, frozen=True):
    """A worker stores *value* under *key* in the store of *job*."""

    member: int
    job: int
    key: str
    value: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """A worker asks for the value of *key*, as soon as there is one."""

    member: int
    job: int
    key: str


class Add(msgspec.Struct, tag=True, frozen=True):
    """A holder of the key (`bpsfast add`) asks for *count* more workers. The reply is `Added`."""

    member: int
    count: int


class Added(msgspec.Struct, tag=True, frozen=True):
    """The coordinator has started *count* workers; if they are fewer than were asked for, *reason* says why."""

    count: int
    reason: str


class Formed(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells a worker that it is *rank* of *size* in *job*. `lost_worker`: the policy.

    `n_commits`: of the member that has committed most often.
    """

    job: int
    rank: int
    size: int
    lost_worker: str
    n_commits: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells that there is no next job. `error`: the name of a class of `errors`."""

    error: str
    reason: str


class Over(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells that the training has ended."""


class Wait(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells all waiting members, every `WORD_EVERY_S`, that it lives, and what is awaited.

    `prepares`: a job runs, and the member is to prepare itself to be let in, and to tell that (`Prepared`).
    """

    awaited: str
    prepares: bool = False


class Void(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells that *job* has lost a member; members that still join it must not wait for it."""

    job: int
    reason: str


class Dismissed(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells a worker that the training goes on without it, as it was told to leave: *reason*."""

    reason: str


class Newcomers(msgspec.Struct, tag=True, frozen=True):
    """The coordinator tells that *count* members wait to join those of *job*, and that *n_leaving* are to leave it."""

    job: int
    count: int
    n_leaving: int = 0


class Value(msgspec.Struct, tag=True, frozen=True):
    """The coordinator sends the value that a worker has asked for."""

    job: int
    key: str
    value: str


_to_coordinator = msgspec.msgpack.Decoder(Hello | Come | Prepared | Done | Put | Want | Add)
_to_member = msgspec.msgpack.Decoder(Formed | Refused | Over | Dismissed | Wait | Void | Newcomers | Value | Added)


def stored_nbytes(key: str, value: str) -> int:
    """Return the bytes that count against the limits of the store: UTF-8, and the cost of an entry."""
    return len(key.encode()) + len(value.encode()) + 256


def listen(key: bytes, host: str, ports: tuple[int, int] = (0, 0)) -> LeaderChannel:
    """Return the coordinator's end, at *host* and one of *ports*; arguments and errors are those of `LeaderChannel`."""
    return LeaderChannel(key, host, _to_coordinator, ports)


def connect(host: str, port: int, key: bytes) -> FollowerChannel:
    """Return a worker's end; raises as `FollowerChannel`."""
    return FollowerChannel(host, port, key, _to_member, "the coordinator (bpsfast run)")
