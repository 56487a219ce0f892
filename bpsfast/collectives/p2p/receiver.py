"""Matches messages of other ranks with receive calls by MPI's rules, and brings payloads into these calls' memory."""
from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from ...orchestration.errors import BpsError, CapacityError, MismatchError
from . import cross_memory, protocol
from .frame_socket import FrameSocket
from .progress_engine import ProgressEngine
from .protocol import ReceiveCredit, SendCredit
from .transfer import Arrival, Incoming, Outgoing, Transfer, view

log = logging.getLogger("bpsfast.collectives.p2p")


class MessageSource(Protocol):
    """Another rank, as the receiver needs it: a `Peer`, which documents these."""

    rank: int
    pid: int  # of the process whose memory can be read; 0: it cannot
    link: FrameSocket | None
    error: BpsError | None

    def consumed(self, nbytes: int) -> None: ...
    def taken(self, number: int) -> None: ...
    def want(self, incoming: Incoming) -> None: ...


R = TypeVar("R")
A = TypeVar("A")
_Key = tuple[int, int | None, int | None]


@dataclass
class Matching(Generic[R, A]):
    """Matches receives with messages, and keeps those without a partner. Source or tag None, of a receive: any.

    Looking up takes constant time unless source or tag is any; then it grows with the different (source, tag) of the
    messages that lie on the channel.
    """

    _receives: dict[_Key, deque[tuple[int, R]]] = field(default_factory=dict)
    _arrivals: dict[int, dict[tuple[int, int], deque[tuple[int, A]]]] = field(default_factory=dict)
    _n: int = 0

    def receive(self, channel: int, source: int | None, tag: int | None, receive: R) -> A | None:
        """Return the earliest message that *receive* matches, or keep it until one arrives."""
        here = self._arrivals.get(channel)
        if here:
            if source is not None and tag is not None:
                key = (source, tag) if (source, tag) in here else None
            else:
                fitting = [each for each in here if source in (None, each[0]) and tag in (None, each[1])]
                key = min(fitting, key=lambda each: here[each][0][0], default=None)
            if key is not None:
                _, arrival = here[key].popleft()
                if not here[key]:
                    del here[key]
                if not here:
                    del self._arrivals[channel]
                return arrival
        self._n += 1
        self._receives.setdefault((channel, source, tag), deque()).append((self._n, receive))
        return None

    def arrive(self, channel: int, source: int, tag: int, arrival: A) -> R | None:
        """Return the earliest receive that matches the message *arrival*, or keep it until one is posted."""
        receives = self._receives
        best: _Key | None = None
        for key in ((channel, source, tag), (channel, None, tag), (channel, source, None), (channel, None, None)):
            if key in receives and (best is None or receives[key][0][0] < receives[best][0][0]):
                best = key
        if best is not None:
            _, receive = receives[best].popleft()
            if not receives[best]:
                del receives[best]
            return receive
        self._n += 1
        here = self._arrivals.setdefault(channel, {})
        here.setdefault((source, tag), deque()).append((self._n, arrival))
        return None

    def withdraw(self, receive: R) -> bool:
        """Remove *receive*; return False if it has matched a message already."""
        return bool(self.take_receives(lambda source, each: each is receive))

    def waits(self, receive: R) -> bool:
        """Return whether *receive* has matched no message yet. Looks at all receives."""
        return any(each is receive for queue in self._receives.values() for _, each in queue)

    def take_receives(self, chosen: Callable[[int | None, R], bool]) -> list[R]:
        """Remove the receives for which ``chosen(source, receive)`` holds and return them, the earliest first."""
        found: list[tuple[int, R]] = []
        for key, queue in list(self._receives.items()):
            found += [each for each in queue if chosen(key[1], each[1])]
            kept = deque(each for each in queue if not chosen(key[1], each[1]))
            if kept:
                self._receives[key] = kept
            else:
                del self._receives[key]
        return [receive for _, receive in sorted(found, key=lambda each: each[0])]

    def take_arrivals(self, chosen: Callable[[int, A], bool]) -> list[A]:
        """Remove the messages for which ``chosen(source, message)`` holds and return them, the earliest first."""
        found: list[tuple[int, A]] = []
        for here in self._arrivals.values():
            for key, queue in list(here.items()):
                found += [each for each in queue if chosen(key[0], each[1])]
                kept = deque(each for each in queue if not chosen(key[0], each[1]))
                if kept:
                    here[key] = kept
                else:
                    del here[key]
        self._arrivals = {channel: here for channel, here in self._arrivals.items() if here}
        return [arrival for _, arrival in sorted(found, key=lambda each: each[0])]

    def describe(self, channel: int) -> str:
        """Return which messages on *channel* have no receive, in words: "rank 1 tag 7 (3 messages), ..."."""
        here = self._arrivals.get(channel) or {}
        parts = [f"rank {source} tag {tag}" + (f" ({len(queue)} messages)" if len(queue) > 1 else "")
                 for (source, tag), queue in sorted(here.items())[:8]]
        return ", ".join(parts + ["..."] * (len(here) > 8))


class MessageReceiver:
    """Receives of *rank*, from itself and *peers* (by rank). Used with *progress*'s lock, except `read_piece`."""

    def __init__(self, rank: int, peers: Mapping[int, MessageSource], progress: ProgressEngine) -> None:
        self.rank = rank
        self.matching: Matching[Transfer, Arrival] = Matching()
        self._peers, self._progress, self._lock = peers, progress, progress.lock
        self._pulls: deque[Incoming] = deque()
        self._own_allowance, self._own_usage = SendCredit(), ReceiveCredit()

    def receive(self, transfer: Transfer) -> bool:
        """Add a receive; return whether it has matched a message that had arrived."""
        arrival = self.matching.receive(transfer.channel, transfer.peer, transfer.tag, transfer)
        if arrival is not None:
            self._meet(transfer, arrival)
        return arrival is not None

    def arrived(self, channel: int, arrival: Arrival) -> None:
        """Handle a message that has arrived or was announced. With the lock."""
        transfer = self.matching.arrive(channel, arrival.source, arrival.tag, arrival)
        if transfer is not None:
            self._meet(transfer, arrival)
        elif arrival.data is not None:
            arrival.data = bytes(arrival.data)  # the staging buffer is used again

    def lost(self, rank: int, error: BpsError) -> None:
        """Fail what needs *rank*. Messages that have arrived from it in full stay. With the lock."""
        self.matching.take_arrivals(lambda source, each: source == rank and each.data is None)
        for transfer in self.matching.take_receives(lambda source, each: source == rank):
            transfer.finish(error)
        for each in [each for each in self._pulls if each.arrival.source == rank]:
            self._pulls.remove(each)
            each.transfer.finish(error)

    def fail(self, error: BpsError) -> None:
        """Fail all receives and messages to itself with *error*; peers end their own."""
        for transfer in self.matching.take_receives(lambda source, each: True):
            transfer.finish(error)
        for arrival in self.matching.take_arrivals(lambda source, each: True):
            if arrival.outgoing is not None:
                arrival.outgoing.transfer.finish(error)

    def send_to_self(self, outgoing: Outgoing) -> None:
        transfer, nbytes = outgoing.transfer, outgoing.nbytes
        assert transfer.tag is not None
        arrival = Arrival(self.rank, transfer.tag, nbytes)
        if nbytes <= protocol.EAGER_NBYTES and self._own_allowance.take_room(nbytes):
            self._own_usage.eager(nbytes)
            arrival.data = view(transfer.address, nbytes)
            self.arrived(transfer.channel, arrival)
            transfer.finish()
        else:
            arrival.outgoing = outgoing
            self.arrived(transfer.channel, arrival)

    def _meet(self, transfer: Transfer, arrival: Arrival) -> None:
        """Bring a message into the memory of the receive that it has matched."""
        transfer.source, transfer.tag, transfer.nbytes = arrival.source, arrival.tag, arrival.nbytes
        error = self._make_room(transfer)
        if arrival.data is not None:
            if error is None and arrival.nbytes:
                view(transfer.address, arrival.nbytes, writable=True)[:] = arrival.data
            self._consumed(arrival)
        elif arrival.outgoing is not None:
            if error is None:
                ctypes.memmove(transfer.address, arrival.outgoing.transfer.address, arrival.nbytes)
            arrival.outgoing.transfer.finish()
        elif error is None and arrival.nbytes:
            self._fetch(Incoming(transfer, arrival))
            return
        else:
            self._peers[arrival.source].taken(arrival.number)
        transfer.finish(error)

    def _make_room(self, transfer: Transfer) -> BpsError | None:
        """Allocate memory if the receive has none; return an error if the message does not fit."""
        if transfer.capacity >= transfer.nbytes:
            return None
        if transfer.capacity >= 0:
            return MismatchError(f"a message of {transfer.nbytes} bytes from rank {transfer.source} with tag "
                                 f"{transfer.tag} on channel {transfer.channel} does not fit into the "
                                 f"{transfer.capacity} bytes of rank {self.rank}'s receive")
        try:
            transfer.data = np.empty(transfer.nbytes, np.uint8)
        except MemoryError:
            return CapacityError(f"rank {self.rank} has no memory for a message of {transfer.nbytes} bytes from rank "
                                 f"{transfer.source}")
        transfer.address = transfer.data.ctypes.data
        return None

    def _consumed(self, arrival: Arrival) -> None:
        if arrival.source == self.rank:
            self._own_allowance.give_room(self._own_usage.received(arrival.nbytes))
        else:
            self._peers[arrival.source].consumed(arrival.nbytes)

    def _fetch(self, incoming: Incoming) -> None:
        peer = self._peers[incoming.arrival.source]
        if peer.pid:
            self._pulls.append(incoming)
            self._progress.nudge()
        else:
            peer.want(incoming)

    def read_piece(self) -> bool:
        """Read a piece of the next payload from its sender's memory; return whether there was one."""
        if not self._pulls:
            return False
        with self._lock:
            if not self._pulls:
                return False
            incoming = self._pulls.popleft()
            transfer, arrival = incoming.transfer, incoming.arrival
            peer, done = self._peers[arrival.source], incoming.n_received
        n = 0
        if peer.pid:
            try:
                n = cross_memory.read(peer.pid, arrival.address + done, transfer.address + done,
                                      min(cross_memory.PIECE_NBYTES, arrival.nbytes - done))
            except OSError as exc:
                log.info("rank %d cannot read rank %d's memory any more: %s", self.rank, peer.rank, exc)
        with self._lock:
            incoming.n_received += n
            if peer.link is None:
                transfer.finish(peer.error)
            elif n == 0 or peer.link.has_hung_up:  # what was read may be invalid: the connection tells how it ended
                peer.pid = incoming.n_received = 0
                peer.want(incoming)
            elif incoming.n_received == arrival.nbytes:
                peer.taken(arrival.number)
                transfer.finish()
            else:
                self._pulls.append(incoming)
        return True
