"""The endpoint of a rank: sends messages to other ranks and receives theirs.

A small message is sent at once and waits at the receiver, in bounded memory. Any other waits at the sender until a
receive matches it. So a send of up to `protocol.EAGER_NBYTES` usually completes without a receive, a larger one never
does; as with MPI_Send, a program must not rely on the former.
"""
from __future__ import annotations

import logging
import os
import select
import socket
import weakref
from collections.abc import Callable

from ...orchestration.errors import BpsError, ClosedError, ConfigError, PeerLostError, StallError
from ...trainer.session import Session
from . import cross_memory, protocol
from .connector import JOINED, PeerConnector
from .peer import CompetingConnection, Peer
from .progress_engine import ProgressEngine
from .receiver import MessageReceiver
from .transfer import Outgoing, Transfer

log = logging.getLogger("bpsfast.collectives.p2p")

#: How long `close` waits until the peers have noticed.
_CLOSE_TIMEOUT_S = 2.0


class P2PEndpoint:
    """Messages between the ranks of *session*'s job. Any thread. An extension of the session, which closes it.

    Two messages from one rank to another on one channel do not overtake each other where a receive matches both. A
    channel is a number on which the members of a group agree: it keeps independent groups apart.
    """

    def __init__(self, session: Session) -> None:
        self.rank, self.size = session.rank, session.size
        self.token = cross_memory.Token()
        self.writing: set[int] = set()  # ranks whose socket buffer is full
        self._session = session
        self._closed = False
        self._error: BpsError | None = None  # what has ended all transfers
        self._n_open = 0
        self._ended: list[Transfer] = []
        self._peers: dict[int, Peer] = {}
        self.progress = ProgressEngine(
            f"bpsfast-p2p-{self.rank}", busy=lambda: bool(self._n_open or self.writing),
            work=lambda: self.receiver.read_piece(), settle=self._settle, check=session.port.check, failed=self._fail,
            tick=lambda: self.connector.tick(), awake_s=session.settings.awake_us / 1e6)
        self._lock = self.progress.lock
        self.receiver = MessageReceiver(self.rank, self._peers, self.progress)
        try:
            self.connector = PeerConnector(session, self._come, self._reached, self._unreachable, self._listen)
        except BaseException:
            self.progress.close()
            raise
        with self._lock:
            for listener in self.connector.listeners:
                self.progress.watch(listener.fileno(), select.EPOLLIN, self._visitor_at(listener))
        self.progress.start()
        _open.add(self)

    # -- what ranks call -------------------------------------------------------------------------------------------

    def send(self, channel: int, destination: int, tag: int, address: int, nbytes: int, owner: object) -> Transfer:
        """Begin to send the *nbytes* at *address* to rank *destination*, this rank too; the memory is read until done.

        *channel* has 32 bits, *tag* 64 bits and a sign. *owner* is kept until the transfer has ended. Raises
        `ConfigError` if there is no such rank, or a number is out of its range, and `ClosedError` if the endpoint is
        closed, or the session is another process's.
        """
        self._check(channel, destination, tag, nbytes)
        transfer = Transfer(self, True, channel, destination, tag, address, nbytes, owner)
        with self._lock:
            self._open(transfer)
            if destination == self.rank:
                self.receiver.send_to_self(Outgoing(transfer))
            else:
                self._peer(destination).send(Outgoing(transfer))
        self._settle()
        return transfer

    def receive(self, channel: int, source: int | None, tag: int | None, address: int, nbytes: int,
                owner: object) -> Transfer:
        """Begin to receive a message of up to *nbytes* into the memory at *address*; None: from any rank, of any tag.

        A longer message is consumed, and is an error of the receive. Errors and *owner* as in `send`.
        """
        self._check(channel, source, tag, nbytes)
        return self._receive(Transfer(self, False, channel, source, tag, address, nbytes, owner))

    def receive_any_size(self, channel: int, source: int | None, tag: int | None) -> Transfer:
        """Begin to receive a message of any size, into memory that is allocated when it is there: `Transfer.data`."""
        self._check(channel, source, tag, 0)
        return self._receive(Transfer(self, False, channel, source, tag, 0, -1, None))

    def close(self) -> None:
        """Close: deliver eager messages, end all else with `ClosedError`, wait up to 2 s for the peers. Idempotent."""
        if self._session.pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _open.discard(self)
        error = ClosedError(f"the message endpoint of rank {self.rank} was closed while a message was under way")
        self._announce_close(error)
        with self._lock:
            for listener in self.connector.listeners:
                self.progress.forget(listener.fileno())
            self._fail(error)
        self._settle()
        self.connector.close()
        self.progress.close()

    # -- for transfers ---------------------------------------------------------------------------------------------

    def wait(self, transfer: Transfer, timeout_s: float | None) -> None:
        if not transfer.done():
            self._require_open()
            timeout_s = self._session.settings.timeout_s if timeout_s is None else timeout_s
            if not self.progress.wait(transfer.done, timeout_s) and not transfer.done():
                raise StallError(self._missing(transfer, timeout_s))
        if transfer.error is not None:
            raise type(transfer.error)(str(transfer.error))

    def on_done(self, transfer: Transfer, callback: Callable[[Transfer], object]) -> None:
        if not transfer.done():
            self._session.require_open()
            with self._lock:
                if not transfer.done():
                    transfer.callbacks.append(callback)
                    return
        _call(callback, transfer)

    def cancel(self, transfer: Transfer) -> bool:
        self._session.require_open()
        with self._lock:
            if transfer.is_send or not self.receiver.matching.withdraw(transfer):
                return False
            transfer.finish(ClosedError(f"{transfer.describe()}: its receive was cancelled"))
        self._settle()
        return True

    def ended(self, transfer: Transfer) -> None:
        """Note, with the lock, that *transfer* has ended; `_settle` does the rest."""
        self._n_open -= 1
        self._ended.append(transfer)

    def job_error(self) -> BpsError | None:
        """Return what ended the job, if something did."""
        try:
            self._session.port.check()
        except BpsError as exc:
            return exc
        return None

    def _check(self, channel: int, peer: int | None, tag: int | None, nbytes: int) -> None:
        if not 0 <= channel < 1 << 32:
            raise ConfigError(f"channel={channel}: a channel is a number of 32 bits")
        if peer is not None and not 0 <= peer < self.size:
            raise ConfigError(f"rank {peer} is none of this job's ranks 0 to {self.size - 1}")
        if tag is not None and not -(1 << 63) <= tag < 1 << 63:
            raise ConfigError(f"tag={tag}: a tag is a signed number of 64 bits")
        if not 0 <= nbytes <= protocol.MESSAGE_MAX_NBYTES:
            raise ConfigError(f"nbytes={nbytes}: a message has 0 to {protocol.MESSAGE_MAX_NBYTES} bytes")
        self._require_open()

    def _require_open(self) -> None:
        self._session.require_open()  # before any lock: a forked child may have inherited it locked
        if self._error is not None:
            raise type(self._error)(str(self._error))
        if self._closed:
            raise ClosedError(f"the message endpoint of rank {self.rank} is closed")

    def _open(self, transfer: Transfer) -> None:
        self._require_open()
        self._n_open += 1

    def _peer(self, rank: int) -> Peer:
        """Return the peer; dial it if neither side has."""
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = Peer(self, rank)
        if peer.state == "apart":
            peer.state = "dialling"
            self.connector.dial(rank)
        return peer

    def _receive(self, transfer: Transfer) -> Transfer:
        source = transfer.peer
        with self._lock:
            self._open(transfer)
            if not self.receiver.receive(transfer) and source is not None and source != self.rank:
                error = self._peer(source).error  # a broken connection shows that the peer is lost
                if error is not None:
                    self.receiver.matching.withdraw(transfer)
                    transfer.finish(error)
        self._settle()
        return transfer

    def _settle(self) -> None:
        """Wake the threads that wait for ended transfers and run callbacks. Without the lock."""
        if not self._ended:
            return
        with self._lock:
            ended, self._ended = self._ended, []
            self.progress.tell()
            callbacks = [(callback, transfer) for transfer in ended for callback in transfer.callbacks]
            for transfer in ended:
                transfer.callbacks = []
        for callback, transfer in callbacks:
            _call(callback, transfer)

    def _missing(self, transfer: Transfer, timeout_s: float) -> str:
        """Return which rank *transfer* waits for, in words."""
        with self._lock:
            peer = self._peers.get(-1 if transfer.peer is None else transfer.peer)
            who = "any rank" if transfer.peer is None else f"rank {transfer.peer}"
            if transfer.is_send:
                state = peer.describe(transfer) if peer else "it waits for a receive on this rank"
                return (f"rank {self.rank} waited {timeout_s:g} s for {who} to receive {transfer.describe()}: {state}")
            unreceived = self.receiver.matching.describe(transfer.channel)
            if not self.receiver.matching.waits(transfer):
                state = (f"rank {transfer.source} has announced it ({transfer.nbytes} bytes), and its payload is on "
                         "the way")
            elif peer is not None and peer.link is None:
                state = f"not connected to it yet; {self.connector.trouble(peer.rank)}"
            else:
                state = f"it has sent none; unreceived here: {unreceived}" if unreceived else "it has sent none"
            return f"rank {self.rank} waited {timeout_s:g} s for {who} to send {transfer.describe()}: {state}"

    # -- connections -----------------------------------------------------------------------------------------------

    def _visitor_at(self, listener: socket.socket) -> Callable[[int], None]:
        return lambda events: self.connector.accept(listener)

    def _listen(self) -> None:
        """Accept connections, or stop accepting, as the connector says."""
        with self._lock:
            if not self._closed:
                for listener in self.connector.listeners:
                    self.progress.change(listener.fileno(), select.EPOLLIN if self.connector.listens else 0)

    def _come(self, rank: int, sock: socket.socket, process: int) -> bool:
        """Accept or refuse a connection from *rank*, in a thread of the connector; return whether it is accepted."""
        with self._lock:
            if self._closed or self._error:
                return False
            peer = self._peers.get(rank)
            if peer is None:
                peer = self._peers[rank] = Peer(self, rank)
            if peer.state not in ("apart", "dialling") or peer.competing is not None:
                return False
            if peer.state == "dialling" and self.rank < rank:
                peer.competing = CompetingConnection(sock, process)
            else:
                peer.join(sock, process, JOINED)
        self._settle()
        return True

    def _reached(self, rank: int, sock: socket.socket, process: int) -> None:
        with self._lock:
            peer = self._peers[rank]
            if self._closed or self._error or peer.state != "dialling":
                sock.close()
                return
            peer.join(sock, process)
        self._settle()

    def _unreachable(self, rank: int, error: BpsError) -> None:
        with self._lock:
            peer = self._peers[rank]
            competing, peer.competing = peer.competing, None
            if peer.state == "dialling" and competing is not None:
                log.info("rank %d cannot connect to rank %d and uses the connection that rank has made: %s", self.rank,
                         rank, error)
                peer.join(competing.sock, competing.process, JOINED)
            elif peer.state == "dialling":
                peer.lose(PeerLostError(f"rank {self.rank} cannot exchange messages with rank {rank}: {error}"))
        self._settle()

    def _fail(self, error: BpsError) -> None:
        """End all transfers with *error*. With the lock."""
        self._error = self._error or error
        for peer in list(self._peers.values()):
            peer.lose(error)
        self.receiver.fail(error)

    def _announce_close(self, error: BpsError) -> None:
        """Withdraw the address, tell the peers, and wait until they have closed their connections."""
        with self._lock:
            for peer in self._peers.values():
                peer.leave(error)
        try:
            self._session.key_values.withdraw(f"post:{self.rank}:")
            self.progress.wait(lambda: all(peer.link is None for peer in list(self._peers.values())), _CLOSE_TIMEOUT_S)
        except BpsError:
            log.debug("the job is over: no peer is waited for")

    def drop_in_child(self) -> None:
        """Close the descriptors in a forked child: else peers would not notice the end of its parent."""
        self.progress.drop_in_child()
        links = [peer.link.sock for peer in self._peers.values() if peer.link is not None]
        competing = [peer.competing.sock for peer in self._peers.values() if peer.competing is not None]
        for sock in [*links, *competing, *self.connector.listeners]:
            sock.close()


def _call(callback: Callable[[Transfer], object], transfer: Transfer) -> None:
    try:
        callback(transfer)
    except (Exception, SystemExit):  # a callback must not end the thread
        log.exception("the callback of %s failed", transfer.describe())


_open: weakref.WeakSet[P2PEndpoint] = weakref.WeakSet()


def _forked() -> None:
    for endpoint in list(_open):
        endpoint.drop_in_child()


os.register_at_fork(after_in_child=_forked)
