"""Where messages meet their receives, and how their payload gets there."""
from __future__ import annotations

import ctypes
import logging
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ...orchestration.errors import BpsError, CapacityError, MismatchError
from . import cross_memory, frames
from .address_view import view
from .matching import Matching
from .message import Arrival, Incoming, Outgoing
from .progress_engine import ProgressEngine
from .send_credit import ReceiveCredit, SendCredit
from .transfer import Transfer

if TYPE_CHECKING:
    from .peer import Peer

log = logging.getLogger("bpsfast.collectives.p2p")


class MessageReceiver:
    """What *rank* receives, from itself and *peers* (by rank). Used with *progress*'s lock, but for `read_piece`."""

    def __init__(self, rank: int, peers: dict[int, Peer], progress: ProgressEngine) -> None:
        self.rank = rank
        self.matching: Matching[Transfer, Arrival] = Matching()
        self._peers, self._progress, self._lock = peers, progress, progress.lock
        self._pulls: deque[Incoming] = deque()
        self._own_allowance, self._own_usage = SendCredit(), ReceiveCredit()

    def receive(self, transfer: Transfer) -> bool:
        """Take a receive; return whether it has met a message that was there."""
        arrival = self.matching.receive(transfer.channel, transfer.peer, transfer.tag, transfer)
        if arrival is not None:
            self._meet(transfer, arrival)
        return arrival is not None

    def arrived(self, channel: int, arrival: Arrival) -> None:
        """Take a message that has come, or was announced. With the lock."""
        transfer = self.matching.arrive(channel, arrival.source, arrival.tag, arrival)
        if transfer is not None:
            self._meet(transfer, arrival)
        elif arrival.data is not None:
            arrival.data = bytes(arrival.data)  # the staging buffer is used again

    def lost(self, rank: int, error: BpsError) -> None:
        """Fail what only *rank* could have brought to an end. What has come from it in full stays. With the lock."""
        self.matching.take_arrivals(lambda source, each: source == rank and each.data is None)
        for transfer in self.matching.take_receives(lambda source, each: source == rank):
            transfer.finish(error)
        for each in [each for each in self._pulls if each.arrival.source == rank]:
            self._pulls.remove(each)
            each.transfer.finish(error)

    def fail(self, error: BpsError) -> None:
        """End everything with *error*, but for what peers bring: that is theirs to end."""
        for transfer in self.matching.take_receives(lambda source, each: True):
            transfer.finish(error)
        for arrival in self.matching.take_arrivals(lambda source, each: True):
            if arrival.outgoing is not None:
                arrival.outgoing.transfer.finish(error)

    def send_to_self(self, outgoing: Outgoing) -> None:
        """Send a message to this rank."""
        transfer, nbytes = outgoing.transfer, outgoing.nbytes
        assert transfer.tag is not None
        arrival = Arrival(self.rank, transfer.tag, nbytes)
        if nbytes <= frames.EAGER_NBYTES and self._own_allowance.take_room(nbytes):
            self._own_usage.eager(nbytes)
            arrival.data = view(transfer.address, nbytes)
            self.arrived(transfer.channel, arrival)
            transfer.finish()
        else:
            arrival.outgoing = outgoing
            self.arrived(transfer.channel, arrival)

    def _meet(self, transfer: Transfer, arrival: Arrival) -> None:
        """Bring a message into the memory of the receive that it has met."""
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
        """Return why the message does not fit; allocate memory if the receive has none."""
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
        """Read a piece of the next payload that is read from its sender's memory; return whether there was one."""
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
                log.info("rank %d reads no more of rank %d's memory: %s", self.rank, peer.rank, exc)
        with self._lock:
            incoming.n_received += n
            if peer.link is None:
                transfer.finish(peer.error)
            elif n == 0 or peer.link.has_hung_up:  # what was read may be anything: its connection will say how it ended
                peer.pid = incoming.n_received = 0
                peer.want(incoming)
            elif incoming.n_received == arrival.nbytes:
                peer.taken(arrival.number)
                transfer.finish()
            else:
                self._pulls.append(incoming)
        return True
