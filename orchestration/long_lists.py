"""Sends each long list to the scheduler once: nearly all ranks declare the same tensors, all nodes know the same units.

    node        `Declare` or `CommittedUnits` with the digest of its list, in place of that
    scheduler   `ListWanted`, if it does not know the list, to the first node that has sent this digest; after a while
                to another one that has
    node        `ListPiece`, as many as it takes

What a node has sent after a message with an unknown list is held until the list is there, so that the job sees each
node's messages in order. Pure.
"""
from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from . import messages as m
from .errors import DECODE_ERRORS, ProtocolError

#: The longest list that a message carries itself: sending that takes less than asking for it.
MOST_INLINE = 64
#: About the most bytes of a piece, so that a node's heartbeats are not delayed by its lists.
_PIECE_NBYTES = 256 << 10
#: The most entries in the lists that a scheduler keeps; one has about 600 bytes.
_MOST_KEPT = 1 << 18
#: The time after which another node is asked for a list, too: the one that was asked may be stopped.
_PATIENCE_S = 2.0
#: The field with the list, by message.
_FIELDS = {m.Declare: "tensors", m.CommittedUnits: "units"}
#: What a node may send at any time: none of it depends on what was declared or committed.
_NEVER_HELD = (m.Heartbeat, m.Lost, m.ProbeResult)

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    m.Declare: msgspec.msgpack.Decoder(tuple[m.TensorSpec, ...]),
    m.CommittedUnits: msgspec.msgpack.Decoder(tuple[m.UnitPlan, ...]),
}
_Some = TypeVar("_Some", bound=m.Message)
#: (connection, message) that can be acted on, in order.
Ready = list[tuple[bytes, m.Message]]


def digest_of(entries: Sequence[Any]) -> bytes:
    """Return the digest that identifies a list by all fields of its *entries* and their order."""
    return hashlib.blake2b(_ENCODER.encode(entries), digest_size=16).digest()


def with_digest(message: _Some) -> _Some:
    """Return *message* with the digest of its list, if that is to be sent in its place."""
    entries = getattr(message, _FIELDS[type(message)])
    return message if len(entries) <= MOST_INLINE else msgspec.structs.replace(message, digest=digest_of(entries))


def as_sent(message: m.Message) -> m.Message:
    """Return *message* as a node sends it to the scheduler: if there is a digest, without the list."""
    field = _FIELDS.get(type(message))
    if field is None or not _digest(message):
        return message
    return msgspec.structs.replace(message, **{field: ()})


def pieces(digest: bytes, entries: Sequence[Any]) -> Iterator[m.ListPiece]:
    """Yield the replies to a `ListWanted`: *entries* are the list, or none if this node does not have it any more."""
    piece: list[msgspec.Raw] = []
    nbytes = 0
    for entry in entries:
        data = _ENCODER.encode(entry)
        if piece and nbytes + len(data) > _PIECE_NBYTES:
            yield m.ListPiece(digest=digest, entries=tuple(piece), is_last=False)
            piece, nbytes = [], 0
        piece.append(msgspec.Raw(data))
        nbytes += len(data)
    yield m.ListPiece(digest=digest, entries=tuple(piece), is_last=True)


@dataclass
class _Question:
    """An unknown list: the connections whose first held message waits for it; when one was asked for it last; what has
    come, by connection.
    """

    asked_s: float
    waiting: dict[bytes, None] = field(default_factory=dict)  # in order
    come: dict[bytes, list[msgspec.Raw]] = field(default_factory=dict)


class LongLists:
    """The long lists that one scheduler knows, and the messages that wait for others. Owner thread only.

    *now*: any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Any, ...]] = OrderedDict()  # the one that was used last is the last
        self._n_known = 0
        self._questions: dict[bytes, _Question] = {}  # by digest
        self._held: dict[bytes, deque[m.Message]] = {}  # by connection; the first one waits for its list

    def receive(self, now: float, sender: bytes, message: m.Message) -> tuple[Ready, m.Outgoing]:
        """Take a *message* of *sender*.

        Returns what can be acted on now, with all lists, and what is to be asked. Raises `ProtocolError` if a list came
        that is not the one of its digest.
        """
        if isinstance(message, m.ListPiece):
            return self._arrived(now, sender, message)
        if isinstance(message, _NEVER_HELD):
            return [(sender, message)], []
        if sender in self._held:
            self._held[sender].append(message)
            return [], []
        whole = self._whole(message)
        if whole is not None:
            return [(sender, whole)], []
        self._held[sender] = deque([message])
        return [], self._wait(now, sender)

    def forget(self, now: float, sender: bytes) -> m.Outgoing:
        """Forget what *sender*, whose connection has ended, has sent; return what is to be asked of others."""
        held = self._held.pop(sender, None)
        if held is None:
            return []
        digest = _digest(held[0])
        question = self._questions[digest]
        del question.waiting[sender]
        was_asked = question.come.pop(sender, None) is not None
        return self._ask(now, digest) if was_asked or not question.waiting else []

    def tick(self, now: float) -> m.Outgoing:
        """Return what is to be asked of others, because the answer takes long."""
        return [each for digest, question in list(self._questions.items()) if now - question.asked_s >= _PATIENCE_S
                for each in self._ask(now, digest, again=True)]

    def _wait(self, now: float, sender: bytes) -> m.Outgoing:
        """Let *sender* wait for the list of its first held message; return what is to be asked."""
        digest = _digest(self._held[sender][0])
        question = self._questions.setdefault(digest, _Question(now))
        question.waiting[sender] = None
        return [] if question.come else self._ask(now, digest)

    def _ask(self, now: float, digest: bytes, again: bool = False) -> m.Outgoing:
        """Ask a connection that waits for the list of *digest*, unless one is asked, or *again*: another one."""
        question = self._questions[digest]
        if not question.waiting:
            del self._questions[digest]
            return []
        holder = next((sender for sender in question.waiting if sender not in question.come), None)
        if holder is None or (question.come and not again):
            return []
        question.asked_s = now
        question.come[holder] = []
        return [(holder, m.ListWanted(digest=digest))]

    def _arrived(self, now: float, sender: bytes, message: m.ListPiece) -> tuple[Ready, m.Outgoing]:
        digest = message.digest
        question = self._questions.get(digest)
        if question is None or sender not in question.come:
            return [], []
        come = question.come[sender]
        come += message.entries
        if not message.is_last:
            return [], []
        if not come:  # what the message is about is over at that node
            del question.come[sender], question.waiting[sender]
            self._held[sender].popleft()
            ready, out = self._release(now, sender)
            return ready, out + (self._ask(now, digest) if digest in self._questions else [])
        entries = _decoded(self._held[sender][0], digest, come)
        del self._questions[digest]
        self._keep(digest, entries)
        found: Ready = []
        out = []
        for holder in question.waiting:
            ready, asked = self._release(now, holder)
            found += ready
            out += asked
        return found, out

    def _release(self, now: float, sender: bytes) -> tuple[Ready, m.Outgoing]:
        """Return what *sender* has sent up to the next message with an unknown list, and the question for that."""
        held = self._held[sender]
        ready: Ready = []
        while held:
            whole = self._whole(held[0])
            if whole is None:
                return ready, self._wait(now, sender)
            held.popleft()
            ready.append((sender, whole))
        del self._held[sender]
        return ready, []

    def _whole(self, message: m.Message) -> m.Message | None:
        """Return *message* with its list, the same tuple for all nodes; None if that is not known."""
        digest = _digest(message)
        if not digest:
            return message
        entries = self._known.get(digest)
        if entries is None:
            return None
        self._known.move_to_end(digest)
        return msgspec.structs.replace(message, **{_FIELDS[type(message)]: entries})

    def _keep(self, digest: bytes, entries: tuple[Any, ...]) -> None:
        self._known[digest] = entries
        self._n_known += len(entries)
        while self._n_known > _MOST_KEPT and len(self._known) > 1:
            self._n_known -= len(self._known.popitem(last=False)[1])


def _digest(message: m.Message) -> bytes:
    return message.digest if isinstance(message, m.Declare | m.CommittedUnits) else b""


def _decoded(message: m.Message, digest: bytes, entries: Sequence[msgspec.Raw]) -> tuple[Any, ...]:
    """Return the list that *message* waits for."""
    data = _ENCODER.encode(entries)
    if hashlib.blake2b(data, digest_size=16).digest() != digest:
        raise ProtocolError(f"a list of {len(entries)} entries came that is not the one of its "
                            f"{type(message).__name__}")
    try:
        return cast("tuple[Any, ...]", _DECODERS[type(message)].decode(data))
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"a list of {len(entries)} entries for a {type(message).__name__} cannot be read: {exc}"
                            ) from exc
