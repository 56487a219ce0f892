"""Replaces a link between two nodes that has failed, by tcp: which side dials or waits, and what both sides exchange.

    seek      a side notices that its link has failed and closes it, so what has arrived is final
    dial      the node that dialled at the start opens all streams again, and numbers them as the pair's next link
    request   the other one asks for that, if it noticed first: by an authenticated connection that it ends at once
    close     a node that is dialled or asked, and has not closed its link, does so first
    exchange  first the node that was dialled, then the other: what each of them awaits, part by part

Both sides have closed the old link before either tells what it awaits, so exactly that is written again. Connections
of a link with a lower number than the newest are refused: late attempts have no effect. So are connections of an epoch
that is over here: a peer that belongs to the job learns of the next one soon, and tries again (`epochs`). A peer that
does not answer is tried again for `lease_s`; so is one that refuses, since a changing firewall looks like the end of a
process. But a refusal is reported at once (`refused`): if the scheduler does not hear that node either, it is lost.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from ...base.encryption import Encryption, seals_of
from ...orchestration.errors import BpsError, ProtocolError, StallError
from ...orchestration.messages import NodeInfo
from ...orchestration.security import HandshakeResult, StreamHello
from ...pyx.ring import MAX_PARTS
from ...pyx.seal import RECORD_NBYTES, TAG_NBYTES
from ...pyx.tcp import crc32c
from . import tcp
from .tcp import Epochs

log = logging.getLogger("bpsfast.node")

#: The stream number of a connection that asks the peer to dial; no tcp stream has it.
RECONNECT_STREAM = 1001
#: The stream number of a connection that announces that all ranks of its node have left the job.
SHUTDOWN_STREAM = 1002
#: The stream number of a connection that only tests whether this node is alive.
PROBE_STREAM = 1003
#: Timeout of one attempt to connect: long enough for a second packet if the first is lost.
_CONNECT_S = 1.5
_PAUSE_S = 0.2
#: A second refusal after this time is reported: if a process has died, all others wait for that.
_REFUSED_S = 0.05
#: After a link that lived shorter than this, the next one is not tried at once.
_SHORT_LIFE_S = 1.0
_JOIN_S = 1.0
#: A part and a round take at most ten bytes, with five bytes for the list of both.
_MAX_NBYTES = 16 * MAX_PARTS + 16

Awaited = Callable[[], Mapping[int, int]]

_DECODER = msgspec.msgpack.Decoder(dict[int, int])


@dataclass
class _Pair:
    """The state of one peer. `awaited`: what was awaited over the closed link, until there is a new one.

    `made`, `over`, `newest`: numbers of the last link that was made, the last one that ended here, and the last one
    that was tried. `heard`: when the peer was last known to be alive.
    """

    awaited: Awaited | None = None
    made: int = 0
    over: int = -1
    newest: int = 0
    half: dict[int, tuple[socket.socket, bytes]] = field(default_factory=dict)
    epoch: int = 0  # of `half`
    is_requested: bool = False
    failure: str = ""
    heard: float = 0.0
    made_at: float = float("-inf")


class Reconnector:
    """Replaces links of one node. `seek`, `requested`, `failed`: control loop's thread; `accept`: data port's threads.

    Parameters
    ----------
    me, peers, key, epochs
        See `Peering`.
    n_streams
        Streams of each link.
    lease_s, patience_s
        How long a peer that does not answer is tried; how long one that answers may take to close its link.
    offer, drop
        Called with a new link; and with a node's index, when an offered link that was not taken has to be closed. One
        call at a time.
    notify
        Called from any thread when `requested`, `refused` or `failed` has changed.
    encryption, checks
        Which links are encrypted, and whether the others use checksums.
    """

    def __init__(self, me: NodeInfo, peers: Mapping[int, NodeInfo], key: bytes, epochs: Epochs, n_streams: int,
                 lease_s: float, patience_s: float, offer: Callable[[tcp.TcpLink], None], drop: Callable[[int], None],
                 notify: Callable[[], None], encryption: Encryption = Encryption.NONE, checks: bool = False) -> None:
        self._me = me
        self._peers = peers
        self._key = key
        self._epochs = epochs
        self._n_streams = n_streams
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._offer = offer
        self._drop = drop
        self._notify = notify
        self._encryption = encryption
        self._checks = checks
        self._pairs = {index: _Pair() for index in peers}
        self._refused: set[int] = set()
        self._changed = threading.Condition()
        self._busy: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    # -- for the control loop's thread --------------------------------------------------------------------

    def seek(self, index: int, awaited: Awaited) -> None:
        """Seek a new link to node *index*, whose link is closed; *awaited* returns what has not arrived over it.

        Ends with `offer`, or with `failed`.
        """
        with self._changed:
            pair = self._pairs[index]
            self._drop(index)
            pair.awaited, pair.over, pair.is_requested, pair.failure = awaited, pair.made, False, ""
            pair.heard = time.monotonic()
            self._changed.notify_all()
            if self._closed:
                return
            thread = threading.Thread(target=self._seek, args=(index, pair, awaited), name="bpsfast-reconnect",
                                      daemon=True)
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def expect(self, index: int) -> None:
        """Add node *index*, which *peers* contains from now on."""
        with self._changed:
            self._pairs[index] = _Pair()

    def give_up(self, index: int, why: str) -> None:
        """Refuse node *index* from now on: it is lost, even if it connects."""
        with self._changed:
            pair = self._pairs.get(index)
            if pair is None:  # neither of the two has ranks
                return
            pair.failure, pair.is_requested = pair.failure or why, False
            self._changed.notify_all()

    def cancel(self, index: int) -> None:
        """Seek no link to node *index* any more: tcp is not used. Attempts that are under way come to nothing."""
        with self._changed:
            pair = self._pairs[index]
            self._drop(index)
            pair.newest += 1
            pair.made, pair.awaited, pair.is_requested = pair.newest, None, False
            self._close_half(pair)
            self._changed.notify_all()

    def newest(self, index: int) -> int:
        """Return the number of the last link to node *index* that was tried."""
        with self._changed:
            return self._pairs[index].newest

    def resumed(self, index: int, newest_there: int) -> None:
        """Give the link of another kind, which is used now, the next number on both sides: later requests name it."""
        with self._changed:
            pair = self._pairs[index]
            pair.made = pair.newest = max(pair.newest, newest_there) + 1

    def requested(self) -> list[int]:
        """Return the nodes that have closed their side of the link; until `seek`."""
        with self._changed:
            return [index for index, pair in self._pairs.items() if pair.is_requested]

    def refused(self) -> set[int]:
        """Return the nodes that were found to refuse connections since this was asked last."""
        with self._changed:
            refused, self._refused = self._refused, set()
            return refused

    def failed(self) -> dict[int, str]:
        """Return the nodes to which there will be no new link, with the reason."""
        with self._changed:
            return {index: pair.failure for index, pair in self._pairs.items() if pair.failure}

    def close(self) -> None:
        """Stop seeking links. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for pair in self._pairs.values():
                self._close_half(pair)
            for sock in self._busy:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_JOIN_S)

    # -- seeking ------------------------------------------------------------------------------------------

    def _seek(self, index: int, pair: _Pair, awaited: Awaited) -> None:
        peer = self._peers[index]
        why, refused_at = "", float("inf")
        with self._changed:
            at_once = time.monotonic() - pair.made_at > _SHORT_LIFE_S
            self._changed.wait_for(lambda: not self._is_wanted(pair, awaited), 0 if at_once else _PAUSE_S)
        while self._is_wanted(pair, awaited):
            try:
                if index < self._me.index:
                    self._dial(peer, pair, awaited)
                else:
                    self._connect(peer, pair, RECONNECT_STREAM, pair.over, self._epochs.known)[0].close()
                refused_at = float("inf")
            except (BpsError, OSError) as exc:
                why, now = str(exc), time.monotonic()
                log.debug("no new link to node %d yet: %s", index, why)
                refused_at = min(refused_at, now) if isinstance(exc, ConnectionRefusedError) else float("inf")
                if now - refused_at >= _REFUSED_S and self._is_wanted(pair, awaited):
                    with self._changed:
                        self._refused.add(index)
                    self._notify()
            with self._changed:
                silent_s = time.monotonic() - pair.heard
                if silent_s < self._lease_s:
                    is_first = 0 <= time.monotonic() - refused_at < _REFUSED_S
                    pause_s = min(_PAUSE_S, _REFUSED_S) if is_first else _PAUSE_S
                    self._changed.wait_for(lambda: not self._is_wanted(pair, awaited), pause_s)
            if silent_s >= self._lease_s:
                self._give_up(pair, awaited, f"it was not reached at {peer.address} within lease_s = "
                                             f"{self._lease_s:g} s ({why or 'no answer'})")

    def _is_wanted(self, pair: _Pair, awaited: Awaited) -> bool:
        return not self._closed and not pair.failure and pair.awaited is awaited

    def _give_up(self, pair: _Pair, awaited: Awaited, why: str) -> None:
        with self._changed:
            if not self._is_wanted(pair, awaited):
                return
            pair.failure = why
        self._notify()

    def _connect(self, peer: NodeInfo, pair: _Pair, stream: int, number: int,
                 epoch: int) -> tuple[socket.socket, bytes]:
        left_s = self._lease_s - (time.monotonic() - pair.heard)
        sock = tcp.reach_once(peer.address, min(_CONNECT_S, max(_PAUSE_S, left_s)))
        hello = StreamHello(peer=self._me.index, stream=stream, epoch=epoch, link=number,
                            encrypted=self._encryption.covers(sock))
        try:
            with self._in_use(sock):
                secret = tcp.prove_to(sock, self._key, hello, peer.index, min(tcp.CHALLENGE_TIMEOUT_S, self._lease_s),
                                      self._epochs.least_of(peer.index))
        except BaseException:
            sock.close()
            raise
        pair.heard = time.monotonic()
        return sock, secret

    def _dial(self, peer: NodeInfo, pair: _Pair, awaited: Awaited) -> None:
        with self._changed:
            pair.newest += 1
            number = pair.newest
        link = tcp.TcpLink(peer.index, number=number, epoch=self._epochs.known, checks=self._checks)
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            for stream in range(self._n_streams):
                sock, secret = self._connect(peer, pair, stream, number, link.epoch)
                link.take(stream, sock, seals_of(secret, dialled=True) if self._encryption.covers(sock) else None)
            try:
                link.awaited_there = self._receive_awaited(link)
                if not self._is_wanted(pair, awaited):
                    raise StallError(f"link {number} came too late")
                self._send_awaited(link, awaited())
            except (BpsError, OSError):
                pair.heard = max(pair.heard, time.monotonic() - self._lease_s / 2)  # or the kernel would have ended it
                raise
            self._made(pair, awaited, link)
            undo.pop_all()

    # -- answering the peer -------------------------------------------------------------------------------

    def accept(self, sock: socket.socket, greeted: HandshakeResult) -> None:
        """Take a connection of a link after the first, or a request to dial; owns *sock* from now on."""
        hello = greeted.hello
        pair = self._pairs.get(hello.peer)
        if pair is None:
            log.warning("refused a data connection of node %d: it is no peer", hello.peer)
            sock.close()
        elif hello.stream == RECONNECT_STREAM:
            sock.close()
            self._on_request(pair, hello)
        else:
            self._gather(pair, sock, greeted)

    def _on_request(self, pair: _Pair, hello: StreamHello) -> None:
        with self._changed:
            pair.heard = time.monotonic()
            pair.is_requested |= pair.awaited is None and hello.link >= pair.made and not pair.failure
        self._notify()

    def _gather(self, pair: _Pair, sock: socket.socket, greeted: HandshakeResult) -> None:
        """Keep one stream of a new link until all of them are there; then use it."""
        hello = greeted.hello
        with self._changed:
            pair.heard = time.monotonic()
            if hello.link > pair.newest:
                pair.newest = hello.link
                self._close_half(pair)
                self._changed.notify_all()  # the previous attempt need not be answered
            if (self._closed or pair.failure or hello.peer < self._me.index or hello.link < pair.newest
                    or hello.link <= pair.made or hello.stream in pair.half or not 0 <= hello.stream < self._n_streams
                    or (pair.half and hello.epoch != pair.epoch)):
                log.debug("refused stream %d of link %d of node %d: too late", hello.stream, hello.link, hello.peer)
                sock.close()
                return
            pair.half[hello.stream], pair.epoch = (sock, greeted.secret), hello.epoch
            if len(pair.half) < self._n_streams:
                return
            link = tcp.TcpLink(hello.peer, number=hello.link, epoch=hello.epoch, checks=self._checks)
            for stream, (each, secret) in pair.half.items():
                link.take(stream, each, seals_of(secret, dialled=False) if self._encryption.covers(each) else None)
            pair.half = {}
            pair.is_requested = pair.awaited is None
        self._notify()
        try:
            self._answer(pair, link)
        except (BpsError, OSError) as exc:
            log.debug("link %d to node %d could not be made: %s", link.number, link.index, exc)
            link.close()
            with self._changed:  # the peer may believe that it was made: a request to dial tells it
                pair.over = max(pair.over, link.number)

    def _answer(self, pair: _Pair, link: tcp.TcpLink) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or pair.failure or pair.newest != link.number or pair.awaited is not None,
                self._patience_s)
            awaited = pair.awaited
        if awaited is None or self._closed or pair.failure or pair.newest != link.number:
            raise StallError("this node has not closed the previous link, or another one was dialled")
        self._send_awaited(link, awaited())
        link.awaited_there = self._receive_awaited(link)
        self._made(pair, awaited, link)

    @staticmethod
    def _close_half(pair: _Pair) -> None:
        for sock, _ in pair.half.values():
            sock.close()
        pair.half = {}

    # -- on both sides ------------------------------------------------------------------------------------

    def _made(self, pair: _Pair, awaited: Awaited, link: tcp.TcpLink) -> None:
        with self._changed:
            if not self._is_wanted(pair, awaited) or pair.newest != link.number:
                raise StallError(f"link {link.number} came too late")
            pair.awaited, pair.made, pair.is_requested, pair.made_at = None, link.number, False, time.monotonic()
            self._offer(link)
            self._changed.notify_all()

    def _send_awaited(self, link: tcp.TcpLink, awaited: Mapping[int, int]) -> None:
        data = msgspec.msgpack.encode(dict(awaited))
        with self._in_use(link.sockets[0]) as sock:
            sock.sendall(_packed(link, len(data).to_bytes(4, "little")) + _packed(link, data))

    def _receive_awaited(self, link: tcp.TcpLink) -> dict[int, int]:
        """Return what the peer awaits, once it has closed the previous link."""
        with self._in_use(link.sockets[0]) as sock:
            nbytes = int.from_bytes(_received(link, sock, 4), "little")
            if nbytes > _MAX_NBYTES:
                raise ProtocolError(f"node {link.index} announces {nbytes} bytes of awaited rounds: too many")
            try:
                return _DECODER.decode(_received(link, sock, nbytes))
            except msgspec.MsgspecError as exc:
                raise ProtocolError(f"the awaited rounds of node {link.index} cannot be read: {exc}") from exc

    @contextlib.contextmanager
    def _in_use(self, sock: socket.socket) -> Iterator[socket.socket]:
        """Use *sock* with timeouts for a silent or slow peer; `close` ends this, too."""
        with self._changed:
            if self._closed:
                raise StallError("the job has ended")
            self._busy.add(sock)
        try:
            tcp.end_when_silent(sock, self._lease_s)
            sock.settimeout(self._patience_s)
            yield sock
            sock.settimeout(None)
        finally:
            with self._changed:
                self._busy.discard(sock)


def _packed(link: tcp.TcpLink, data: bytes) -> bytes:
    """Return *data* as it is sent over the first stream of *link*, before that is handed over."""
    seals = link.seals.get(0)
    if seals is None:
        return data + crc32c(data).to_bytes(4, "little") if link.checks else data
    pieces = range(0, len(data), RECORD_NBYTES)
    return b"".join(seals.out.close(data[begin:begin + RECORD_NBYTES]) for begin in pieces)


def _received(link: tcp.TcpLink, sock: socket.socket, nbytes: int) -> bytes:
    """Receive *nbytes* that the peer has packed by `_packed`; `ProtocolError` if they were changed."""
    seals = link.seals.get(0)
    if seals is None:
        data = tcp.receive(sock, nbytes)
        if link.checks and crc32c(data) != int.from_bytes(tcp.receive(sock, 4), "little"):
            raise ProtocolError(f"a message of node {link.index} arrived damaged: its checksum is wrong")
        return data
    try:
        return b"".join(seals.incoming.open(tcp.receive(sock, min(RECORD_NBYTES, nbytes - begin) + TAG_NBYTES))
                        for begin in range(0, nbytes, RECORD_NBYTES))
    except ValueError as exc:
        raise ProtocolError(f"a message of node {link.index} cannot be authenticated: {exc}") from exc
