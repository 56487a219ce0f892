"""What the workers of an elastic job and their muster tell each other, over the lines of `turn_line`.

Beside the muster's own messages the line carries a key-value store, one for each job, by which the members of the next
job find each other (`bpsfast.launch.rendezvous`).
"""
from __future__ import annotations

import msgspec

from ..priority.group_channel import FollowerChannel as FollowerChannel, Hello as Hello, LeaderChannel as LeaderChannel

#: What a job's members may store in all, and one value with its key; keys that are awaited, and their characters: a
#: member cannot fill the launcher.
MOST_STORED_NBYTES = 16 << 20
MOST_VALUE_NBYTES = 1 << 20
MOST_WANTED = 1 << 12
MOST_KEY_LENGTH = 256
#: How often those who wait hear that the muster is there.
WORD_EVERY_S = 2.0


class Come(msgspec.Struct, tag=True, frozen=True):
    """A worker: it is in no job (any more), and waits for the next one. `node`: ranks with the same share a node.

    `has_state`: it has what the training has come to, of a job before: `n_commits` commits. `reason`: why that job has
    failed, "" if it has not.
    """

    member: int
    node: str
    has_state: bool = False
    n_commits: int = 0
    reason: str = ""


class Done(msgspec.Struct, tag=True, frozen=True):
    """A worker: its training has ended, and that of all other ranks of its job."""

    member: int


class Put(msgspec.Struct, tag=True, frozen=True):
    """A worker: let *key* have *value* in the store of *job*."""

    member: int
    job: int
    key: str
    value: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """A worker: tell me the value of *key*, as soon as it has one."""

    member: int
    job: int
    key: str


class Add(msgspec.Struct, tag=True, frozen=True):
    """Whoever has the key (`bpsfast add`): start *count* more workers. It is answered by `Added`."""

    member: int
    count: int


class Added(msgspec.Struct, tag=True, frozen=True):
    """The muster: so many are started; if fewer than were asked for, *reason* says why."""

    count: int
    reason: str


class Formed(msgspec.Struct, tag=True, frozen=True):
    """The muster: you are *rank* of *size* in *job*. `lost_worker`: the policy."""

    job: int
    rank: int
    size: int
    lost_worker: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The muster: there is no next job. `error`: the name of a class of `errors`."""

    error: str
    reason: str


class Over(msgspec.Struct, tag=True, frozen=True):
    """The muster: the training has ended."""


class Wait(msgspec.Struct, tag=True, frozen=True):
    """The muster, every `WORD_EVERY_S`, to all who have come: it is there, and this is what is awaited."""

    awaited: str


class Void(msgspec.Struct, tag=True, frozen=True):
    """The muster: *job* has lost a member; who is still joining it shall not wait for it."""

    job: int
    reason: str


class Newcomers(msgspec.Struct, tag=True, frozen=True):
    """The muster: so many wait to join those of *job*."""

    job: int
    count: int


class Value(msgspec.Struct, tag=True, frozen=True):
    """The muster: what was wanted."""

    job: int
    key: str
    value: str


_to_muster = msgspec.msgpack.Decoder(Hello | Come | Done | Put | Want | Add)
_to_member = msgspec.msgpack.Decoder(Formed | Refused | Over | Wait | Void | Newcomers | Value | Added)


def stored_nbytes(key: str, value: str) -> int:
    """Return what counts against `MOST_STORED_NBYTES` and `MOST_VALUE_NBYTES`: UTF-8, and what an entry costs."""
    return len(key.encode()) + len(value.encode()) + 256


def listen(key: bytes, host: str) -> LeaderChannel:
    """Return the muster's end, at *host*; raises as `LeaderChannel`."""
    return LeaderChannel(key, host, _to_muster)


def connect(host: str, port: int, key: bytes) -> FollowerChannel:
    """Return a worker's end; raises as `FollowerChannel`."""
    return FollowerChannel(host, port, key, _to_member, "the muster (bpsfast run)")
