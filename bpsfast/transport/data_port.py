"""The port that other nodes' data connections come to: open for the life of a job, and not a stranger's to fill.

Whoever connects has a thread and a few seconds to prove the job's key. So many may be at it at a time; one more pushes
out whoever has been longest without a proof, since a node of the job needs milliseconds.
"""
from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from ..orchestration.errors import BpsError
from ..orchestration.security import Greeted
from . import tcp
from .epochs import Epochs

log = logging.getLogger("bpsfast.node")

#: So many may be without a proof beside the connections that the job itself makes at once.
N_STRANGERS = 64
#: Who came so recently is not pushed out: a node of the job on a busy machine may need that long.
_GRACE_S = 1.0
#: Descriptors or memory may be there again after so long.
_RESPITE_S = 0.2
#: How soon it is looked again whether there is room for one more.
_BREATH_S = 0.02
#: What is left unread would turn the end of a refused connection into a reset.
_DRAIN_NBYTES = 1 << 16
#: When the port is closed, whoever has proven itself is told elsewhere; its thread may still be in a system call.
_JOIN_S = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: What `accept` may say of a connection that was over before it was taken (accept(2)).
_OVER = (errno.ECONNABORTED, errno.EAGAIN, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH,
         errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOPROTOOPT, errno.ENONET, errno.EOPNOTSUPP, errno.ETIMEDOUT)


class DataPort:
    """Accepts on *listener*, which is this object's to close, from `start` until `close`.

    Parameters
    ----------
    mine, epochs
        This node's index, and the epochs of which a dialler must know the latest.
    came
        Called with (socket, greeted), in a thread of its own, once a connection has proven itself; the socket goes with
        it.
    n_expected
        Connections that the job itself may open at the same time.
    encrypted
        Whether this job's connections are.
    """

    def __init__(self, listener: socket.socket, key: bytes, mine: int, epochs: Epochs,
                 came: Callable[[socket.socket, Greeted], None], n_expected: int,
                 encrypted: bool = False) -> None:
        self._listener = listener
        self._key = key
        self._mine = mine
        self._epochs = epochs
        self._encrypted = encrypted
        self._came = came
        self._room = N_STRANGERS + n_expected
        self._strangers: dict[socket.socket, float] = {}  # in the order in which they came
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = self._exhausted = False
        self._n_refused = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="bpsfast-data-port", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more; end what strangers have begun. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sock in self._strangers:
                _end(sock)
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        for thread in tuple(self._threads):
            thread.join(_JOIN_S)
        os.close(self._wake)
        self._listener.close()

    # -- the thread that accepts --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._listener, select.POLLIN)
        while not self._closed:
            if not self._has_room():
                self._rest(_BREATH_S)
                continue
            poller.poll()
            if self._closed:
                return
            try:
                sock, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    self._exhaust(exc)
                elif exc.errno not in _OVER:
                    log.error("no data connection can be accepted any more: %s", exc)
                    return
                continue
            self._let_in(sock)

    def _has_room(self) -> bool:
        """Whether one more may try; who has been at it for longest is pushed out for that."""
        with self._lock:
            if len(self._strangers) < self._room:
                return True
            oldest, since = next(iter(self._strangers.items()))
            if time.monotonic() - since >= _GRACE_S:
                _end(oldest)  # its thread says so, and makes room
            return False

    def _let_in(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._receive, args=(sock,), name="bpsfast-accept", daemon=True)
        with self._lock:
            self._strangers[sock] = time.monotonic()
            self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        try:
            thread.start()
        except RuntimeError as exc:  # no thread can be had
            self._forget(sock)
            self._threads.discard(thread)
            sock.close()
            self._exhaust(exc)
        else:
            self._exhausted = False

    def _exhaust(self, exc: Exception) -> None:
        if not self._exhausted:
            self._exhausted = True
            log.warning("data connections have to wait until they can be accepted: %s", exc)
        self._rest(_RESPITE_S)

    def _rest(self, duration_s: float) -> None:
        select.select([self._wake], [], [], duration_s)

    # -- a thread for each connection ---------------------------------------------------------------------

    def _receive(self, sock: socket.socket) -> None:
        """Let one connection prove itself. A stranger is refused and logged, and harms nobody."""
        try:
            greeted = tcp.accept(sock, self._key, mine=self._mine, epochs=self._epochs, encrypted=self._encrypted)
        except (BpsError, OSError) as exc:
            self._forget(sock)
            self._refuse(sock, exc)
            return
        self._forget(sock)
        self._came(sock, greeted)

    def _forget(self, sock: socket.socket) -> None:
        """From here on the socket is nobody's to push out."""
        with self._lock:
            self._strangers.pop(sock, None)

    def _refuse(self, sock: socket.socket, why: Exception) -> None:
        with self._lock:
            self._n_refused += 1
            number = self._n_refused
        if number <= 8 or number & (number - 1) == 0:  # a flood would fill the disk
            log.log(logging.DEBUG if self._closed else logging.WARNING, "refused a data connection: %s%s", why,
                    f" ({number} were by now)" if number > 8 else "")
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            sock.setblocking(False)
            sock.recv(_DRAIN_NBYTES)
        sock.close()


def _end(sock: socket.socket) -> None:
    """Make whoever waits for *sock* return; the descriptor stays its own."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
