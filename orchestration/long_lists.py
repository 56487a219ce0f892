"""Sends each long list to the scheduler once: nearly all ranks declare the same tensors, all nodes know the same units.

    node        `Declare` or `CommittedUnits` with the digest of its list, in place of that
    scheduler   `ListWanted`, if it does not know the list, to the first node that has sent this digest; if the answer
                takes long, to another one that has
    node        `ListPiece`, as many as it takes

What a node sends after a message with an unknown list is held until the list is there, so that the job sees each node's
messages in order. Pure.
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
#: About the most bytes of a piece: no list is too long for a message then.
_PIECE_NBYTES = 256 << 10
#: The most entries in the lists that a scheduler keeps; one has about a kilobyte.
_MOST_KEPT = 1 << 18
#: The most messages of one node that wait, and the most entries of a list: more is a mistake of the node.
_MOST_HELD, _MOST_ENTRIES = 1 << 17, 1 << 17
#: The time after which another node is asked for a list, too: the one that was asked may be stopped.
_PATIENCE_S = 2.0
#: The field with the list, by message.
_FIELDS = {m.Declare: "tensors", m.CommittedUnits: "units"}
#: Messages that do not depend on what was declared or committed.
_NEVER_HELD = (m.Heartbeat, m.FinishAck, m.Lost, m.ProbeResult)

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
    """A list that the scheduler does not know, which messages of type *kind* have.

    `waiting`: the connections with such messages, in order. `asked_s`: when one of them was asked last. `come`: what
    those that were asked have sent.
    """

    kind: type
    asked_s: float
    waiting: dict[bytes, None] = field(default_factory=dict)
    come: dict[bytes, list[msgspec.Raw]] = field(default_factory=dict)


class LongLists:
    """The long lists that one scheduler knows, and the messages that wait for others. Owner thread only.

    *now*: any monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[type, bytes], tuple[Any, ...]] = OrderedDict()  # used last: at the end
        self._n_known = 0
        self._questions: dict[bytes, _Question] = {}  # by digest
        self._held: dict[bytes, deque[m.Message]] = {}  # by connection; the first one waits for its list
        self._slow: set[bytes] = set()  # connections that were asked, and have sent nothing in time

    @property
    def senders(self) -> list[bytes]:
        """The connections with messages that wait."""
        return list(self._held)

    def receive(self, now: float, sender: bytes, message: m.Message) -> tuple[Ready, m.Outgoing]:
        """Take a *message* of *sender*.

        Returns what can be acted on now, with all lists, and what is to be asked. Raises `ProtocolError` if *sender*
        has sent a list that is not the one of its digest, or too much.
        """
        if isinstance(message, m.ListPiece):
            return self._arrived(now, sender, message)
        if isinstance(message, _NEVER_HELD):
            return [(sender, message)], []
        if isinstance(message, m.Rejoin):  # what the node has sent before and was not answered is said again
            return [(sender, message)], self.forget(now, sender)
        held = self._held.get(sender, ())
        whole = self._whole(message)
        if whole is not None and not held:
            return [(sender, whole)], []
        if len(held) >= _MOST_HELD:
            raise ProtocolError(f"{len(held)} messages wait for a list that their node does not send")
        self._held.setdefault(sender, deque()).append(message)
        return [], self._wait(now, sender, message) if whole is None else []

    def forget(self, now: float, sender: bytes) -> m.Outgoing:
        """Forget what *sender*, whose connection has ended, has sent; return what is to be asked of others."""
        self._slow.discard(sender)
        out: m.Outgoing = []
        for digest in dict.fromkeys(_digest(each) for each in self._held.pop(sender, ())):
            out += self._leave(now, sender, digest)
        return out

    def forget_lists(self, kind: type[m.Message]) -> None:
        """Forget the lists of messages of a type, of which no more are expected."""
        for key in [key for key in self._known if key[0] is kind]:
            self._n_known -= len(self._known.pop(key))

    def tick(self, now: float) -> m.Outgoing:
        """Return what is to be asked of others, because the answer takes long."""
        out: m.Outgoing = []
        for digest, question in list(self._questions.items()):
            if now - question.asked_s >= _PATIENCE_S:
                self._slow |= {sender for sender, come in question.come.items() if not come}
                out += self._ask(now, digest)
        return out

    def _wait(self, now: float, sender: bytes, message: m.Message) -> m.Outgoing:
        """Let *sender* wait for the list of *message*; return what is to be asked."""
        digest = _digest(message)
        question = self._questions.setdefault(digest, _Question(type(message), now))
        if question.kind is not type(message):
            raise ProtocolError(f"a {type(message).__name__} has the digest of a list of {question.kind.__name__}")
        question.waiting[sender] = None
        return [] if question.come else self._ask(now, digest)

    def _leave(self, now: float, sender: bytes, digest: bytes) -> m.Outgoing:
        """Let *sender* wait no more for the list of *digest*; return what is to be asked of others."""
        question = self._questions.get(digest)
        if question is None:
            return []
        question.waiting.pop(sender, None)
        was_asked = question.come.pop(sender, None) is not None
        if not question.waiting:
            del self._questions[digest]
            return []
        return self._ask(now, digest) if was_asked and not question.come else []

    def _ask(self, now: float, digest: bytes) -> m.Outgoing:
        """Ask one connection more for the list of *digest*, if one is left; last of all one that is slow."""
        question = self._questions[digest]
        left = [sender for sender in question.waiting if sender not in question.come]
        holder = next((sender for sender in left if sender not in self._slow), left[0] if left else None)
        question.asked_s = now
        if holder is None:
            return []
        question.come[holder] = []
        return [(holder, m.ListWanted(digest=digest))]

    def _arrived(self, now: float, sender: bytes, message: m.ListPiece) -> tuple[Ready, m.Outgoing]:
        digest = message.digest
        question = self._questions.get(digest)
        if question is None or sender not in question.come:
            return [], []
        self._slow.discard(sender)
        come = question.come[sender]
        come += message.entries
        if len(come) > _MOST_ENTRIES:
            raise ProtocolError(f"a list of more than {_MOST_ENTRIES} entries came")
        if not message.is_last:
            return [], []
        if not come:  # what the message is about is over at that node
            self._held[sender] = deque(each for each in self._held[sender] if _digest(each) != digest)
            out = self._leave(now, sender, digest)
            ready, asked = self._release(now, sender)
            return ready, out + asked
        self._keep((question.kind, digest), _decoded(question.kind, digest, come))
        del self._questions[digest]
        found: Ready = []
        out = []
        for holder in question.waiting:
            ready, asked = self._release(now, holder)
            found += ready
            out += asked
        return found, out

    def _release(self, now: float, sender: bytes) -> tuple[Ready, m.Outgoing]:
        """Return what *sender* has sent up to the next message with an unknown list."""
        held = self._held[sender]
        ready: Ready = []
        while held:
            whole = self._whole(held[0])
            if whole is None:  # a list that was known when this came may be forgotten by now
                return ready, self._wait(now, sender, held[0])
            held.popleft()
            ready.append((sender, whole))
        del self._held[sender]
        return ready, []

    def _whole(self, message: m.Message) -> m.Message | None:
        """Return *message* with its list, the same tuple for all nodes; None if that is not known."""
        digest = _digest(message)
        if not digest:
            return message
        entries = self._known.get((type(message), digest))
        if entries is None:
            return None
        self._known.move_to_end((type(message), digest))
        return msgspec.structs.replace(message, **{_FIELDS[type(message)]: entries})

    def _keep(self, key: tuple[type, bytes], entries: tuple[Any, ...]) -> None:
        self._known[key] = entries
        self._n_known += len(entries)
        while self._n_known > _MOST_KEPT and len(self._known) > 1:
            self._n_known -= len(self._known.popitem(last=False)[1])


def _digest(message: m.Message) -> bytes:
    return message.digest if isinstance(message, m.Declare | m.CommittedUnits) else b""


def _decoded(kind: type, digest: bytes, entries: Sequence[msgspec.Raw]) -> tuple[Any, ...]:
    """Return the list that messages of type *kind* wait for."""
    data = _ENCODER.encode(entries)
    if hashlib.blake2b(data, digest_size=16).digest() != digest:
        raise ProtocolError(f"a list of {len(entries)} entries came that is not the one of its {kind.__name__}")
    try:
        return cast("tuple[Any, ...]", _DECODERS[kind].decode(data))
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"a list of {len(entries)} entries for a {kind.__name__} cannot be read: {exc}") from exc
