"""This rank's end of the message protocol with one other rank: eager sends within a credit, rendezvous for the rest.

A small message is sent at once while the receiver's credit lasts. Any other is announced; once a receive matches it,
the receiver reads the payload from the sender's memory (`cross_memory`), or asks the sender to send it.
"""
from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from ...orchestration.errors import BpsError, PeerLostError, ProtocolError
from . import cross_memory, protocol
from .connector import CROSSED, REFUSED, PeerConnector
from .frame_socket import FrameSocket
from .progress_engine import ProgressEngine
from .protocol import Frame, ReceiveCredit, SendCredit
from .receiver import MessageReceiver
from .transfer import Arrival, Incoming, Outgoing, Transfer, view

#: "apart": neither rank has dialled; "dialling": this rank has; "joined": there is a connection; "lost": for good.
State = Literal["apart", "dialling", "joined", "lost"]


class CompetingConnection(NamedTuple):
    """A connection that a higher rank has made while this one dials it: *process* as in `Peer.join`."""

    sock: socket.socket
    process: int


class PeerOwner(Protocol):
    """What a peer needs of this rank's endpoint, a `P2PEndpoint`."""

    rank: int
    token: cross_memory.Token
    progress: ProgressEngine
    receiver: MessageReceiver
    connector: PeerConnector
    writing: set[int]

    def job_error(self) -> BpsError | None: ...


class Peer:
    """Rank *rank*, as this rank's endpoint sees it. Everything here is done with the endpoint's lock."""

    def __init__(self, endpoint: PeerOwner, rank: int) -> None:
        self.rank = rank
        self.state: State = "apart"
        self.error: BpsError | None = None
        self.link: FrameSocket | None = None
        self.competing: CompetingConnection | None = None  # used if this rank's own connection fails
        self.pid = 0  # of the process whose memory can be read; 0: it cannot
        self._left: BpsError | None = None  # why this rank has left: what the peer does then is expected
        self._endpoint = endpoint
        self._allowance, self._usage = SendCredit(), ReceiveCredit()
        self._waiting: deque[Outgoing] = deque()
        self._announced: dict[int, Outgoing] = {}
        self._wanted: deque[Outgoing] = deque()
        self._incoming: dict[int, Incoming] = {}
        self._n_announced = self._n_received = 0
        self._process = 0

    # -- the connection --------------------------------------------------------------------------------------------

    def join(self, sock: socket.socket, process: int, greeting: bytes = b"") -> None:
        """Use *sock*, and send *greeting* first; *process*: the other end's id, 0 if it is on another machine."""
        self._dismiss_competing(CROSSED)
        self.link = FrameSocket(sock, self)
        self.state, self._process = "joined", process
        self._endpoint.progress.watch(sock.fileno(), select.EPOLLIN, self._on_events)
        cross_memory.let_read(process)
        token = self._endpoint.token
        self._guard(lambda: self._begin(greeting, Frame(protocol.GREETING, number=token.value, address=token.address)))

    def _begin(self, greeting: bytes, frame: Frame) -> None:
        assert self.link is not None
        if greeting:
            self.link.sock.send(greeting)  # a byte into an empty buffer
        self.link.send(frame)
        self._admit()

    def _dismiss_competing(self, verdict: bytes) -> None:
        competing, self.competing = self.competing, None
        if competing is not None:
            with contextlib.suppress(OSError):  # its rank may be gone
                competing.sock.send(verdict)
            competing.sock.close()

    def lose(self, error: BpsError) -> None:
        """Mark the peer as lost: fail all its transfers, now and later, with *error*."""
        if self.state == "lost":
            return
        error = self._left or error
        self.state, self.error = "lost", error
        self._dismiss_competing(REFUSED)
        self.close()
        under_way = [each.transfer for each in (*self._waiting, *self._announced.values(), *self._wanted)]
        under_way += [each.transfer for each in self._incoming.values()]
        for queue in (self._waiting, self._announced, self._wanted, self._incoming):
            queue.clear()
        for transfer in under_way:
            transfer.finish(error)
        self._endpoint.receiver.lost(self.rank, error)

    def leave(self, error: BpsError) -> None:
        """Tell the peer that no frame follows; transfers under way end with *error*."""
        self._left = error
        if self.link is not None:
            self._guard(lambda: self._send(Frame(protocol.LEAVE)))

    def close(self) -> None:
        """Close the connection. Until then transfers keep their memory, which the peer may be reading."""
        link, self.link = self.link, None
        self._endpoint.writing.discard(self.rank)
        if link is not None:
            link.shutdown_writing()
            self._endpoint.progress.forget(link.sock.fileno())
            link.close()

    def _guard(self, act: Callable[[], object]) -> None:
        """Call *act*; a broken connection or a protocol error marks the peer as lost."""
        try:
            act()
            self._watch_writing()
        except PeerLostError as exc:  # at the end of a job endpoints close before each rank has been told why
            self.lose(self._endpoint.job_error() or PeerLostError(
                f"rank {self.rank} is lost to rank {self._endpoint.rank}: {exc}"))
        except ProtocolError as exc:
            self.lose(ProtocolError(f"rank {self.rank} sent rank {self._endpoint.rank} an invalid frame: {exc}"))
        except OSError as exc:
            self.lose(PeerLostError(f"rank {self.rank} is lost to rank {self._endpoint.rank}: its connection broke: "
                                    f"{exc}"))

    def _on_events(self, events: int) -> None:
        if self.link is not None and events & select.EPOLLOUT:
            self._guard(self.link.flush)
        if self.link is not None and events & ~select.EPOLLOUT:
            self._guard(self.link.read)

    def _watch_writing(self) -> None:
        link, writing = self.link, self._endpoint.writing
        if link is not None and link.backlog != (self.rank in writing):
            (writing.add if link.backlog else writing.discard)(self.rank)
            events = select.EPOLLIN | (select.EPOLLOUT if link.backlog else 0)
            self._endpoint.progress.change(link.sock.fileno(), events)

    def _send(self, frame: Frame, payload: memoryview | None = None) -> None:
        assert self.link is not None
        self.link.send(frame, payload)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, outgoing: Outgoing) -> None:
        """Send a message, or queue it until credit or the connection is there."""
        if self.error is not None:
            outgoing.transfer.finish(self.error)
            return
        self._waiting.append(outgoing)
        if self.link is not None:
            self._guard(self._admit)

    def _admit(self) -> None:
        """Send or announce queued messages in order, as far as credit lasts."""
        waiting = self._waiting
        while waiting and self.link is not None:
            outgoing = waiting[0]
            transfer, nbytes = outgoing.transfer, outgoing.nbytes
            assert transfer.tag is not None
            if nbytes <= protocol.EAGER_NBYTES and self._allowance.take_room(nbytes):
                self._send(Frame(protocol.EAGER, transfer.channel, transfer.tag, 0, nbytes),
                           view(transfer.address, nbytes))
                waiting.popleft()
                transfer.finish()
            elif self._allowance.announce():
                waiting.popleft()
                self._n_announced += 1
                outgoing.number = self._n_announced
                self._announced[outgoing.number] = outgoing
                self._send(Frame(protocol.ANNOUNCE, transfer.channel, transfer.tag, outgoing.number, nbytes,
                                 transfer.address))
            else:
                return

    def next_piece(self) -> tuple[Frame, memoryview] | None:
        """Return the next DATA frame, when nothing else is to be sent; several messages take turns."""
        if not self._wanted:
            return None
        outgoing = self._wanted[0]
        n = min(protocol.PIECE_NBYTES, outgoing.nbytes - outgoing.n_sent)
        piece = view(outgoing.transfer.address + outgoing.n_sent, n)
        outgoing.n_sent += n
        self._wanted.rotate(-1)
        if outgoing.n_sent == outgoing.nbytes:
            self._wanted.pop()
            self._announced[outgoing.number] = outgoing  # until the kernel has it
        return Frame(protocol.DATA, number=outgoing.number, nbytes=n), piece

    def sent(self, frame: Frame) -> None:
        """Note that the kernel has taken a piece; the last one completes the send."""
        outgoing = self._announced.pop(frame.number, None)
        if outgoing is not None:
            outgoing.transfer.finish()

    def describe(self, transfer: Transfer) -> str:
        """Return how far the message of *transfer* is, in words."""
        if self.link is None:
            return f"not connected to it yet; {self._endpoint.connector.trouble(self.rank)}"
        if any(each.transfer is transfer for each in self._waiting):
            return f"{len(self._announced)} messages before it are announced to it, and not received"
        return "announced to it, and not received" if any(
            each.transfer is transfer for each in self._announced.values()) else "its payload is on the way"

    # -- frames ----------------------------------------------------------------------------------------------------

    def handle_frame(self, frame: Frame, payload: memoryview) -> None:
        """Act on *frame*; *payload* is only valid until this returns. May raise `ProtocolError`."""
        if self.link is None:
            return  # the frame before it has closed the connection
        kind = frame.kind
        if kind == protocol.EAGER:
            self._usage.eager(frame.nbytes)
            self._endpoint.receiver.arrived(frame.channel, Arrival(self.rank, frame.tag, frame.nbytes, payload))
        elif kind == protocol.ANNOUNCE:
            self._n_received += 1
            if frame.number != self._n_received:
                raise ProtocolError(f"ANNOUNCE {frame.number}, expected {self._n_received}")
            self._usage.announced()
            self._endpoint.receiver.arrived(frame.channel, Arrival(
                self.rank, frame.tag, frame.nbytes, number=frame.number, address=frame.address))
        elif kind == protocol.DATA:
            self._received(frame)
        elif kind == protocol.CREDIT:
            self._allowance.give_room(frame.nbytes)
            self._admit()
        elif kind in (protocol.WANT, protocol.TAKEN):
            self._answered(frame)
        elif kind == protocol.GREETING:
            if cross_memory.can_read(self._process, frame.address, frame.number):
                self.pid = self._process
        else:
            self.lose(PeerLostError(f"rank {self.rank} has left (it called shutdown, or closed its endpoint): "
                                    f"rank {self._endpoint.rank} exchanges no more messages with it"))

    def _answered(self, frame: Frame) -> None:
        outgoing = self._announced.get(frame.number)
        if outgoing is None or outgoing.n_sent:
            raise ProtocolError(f"{frame.name} of message {frame.number}, which is not announced")
        del self._announced[frame.number]
        self._allowance.answered()
        if frame.kind == protocol.TAKEN:
            outgoing.transfer.finish()
        else:
            self._wanted.append(outgoing)
            if self.link is not None and not self.link.backlog:
                self.link.flush()
        self._admit()

    # -- receiving -------------------------------------------------------------------------------------------------

    def consumed(self, nbytes: int) -> None:
        """Return the credit of a small message that was received."""
        room = self._usage.received(nbytes)
        if room and self.link is not None:
            self._guard(lambda: self._send(Frame(protocol.CREDIT, nbytes=room)))

    def taken(self, number: int) -> None:
        """Tell the peer that the payload of an announced message was read, or is not needed."""
        self._usage.answered()
        if self.link is not None:
            self._guard(lambda: self._send(Frame(protocol.TAKEN, number=number)))

    def want(self, incoming: Incoming) -> None:
        """Ask for the payload of an announced message."""
        if self.error is not None:
            incoming.transfer.finish(self.error)
            return
        number = incoming.arrival.number
        self._usage.answered()
        self._incoming[number] = incoming
        self._guard(lambda: self._send(Frame(protocol.WANT, number=number)))

    def sink(self, frame: Frame) -> memoryview:
        """Return where the payload of a DATA frame goes; `handle_frame` is called when it is there."""
        incoming = self._incoming.get(frame.number)
        left = incoming.arrival.nbytes - incoming.n_received if incoming else 0
        if incoming is None or not 0 < frame.nbytes <= left:
            raise ProtocolError(f"DATA of {frame.nbytes} bytes for message {frame.number}, of which {left} are wanted")
        return view(incoming.transfer.address + incoming.n_received, frame.nbytes, writable=True)

    def _received(self, frame: Frame) -> None:
        incoming = self._incoming[frame.number]
        incoming.n_received += frame.nbytes
        if incoming.n_received == incoming.arrival.nbytes:
            del self._incoming[frame.number]
            incoming.transfer.finish()
