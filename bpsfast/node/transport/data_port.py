"""The port that other nodes' data connections come to: open for the life of a job, and not a stranger's to fill.

Whoever connects has a thread and a few seconds to prove the job's key (`orchestration.handshakes.HandshakeAcceptor`).
"""
from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from ...base.encryption import Encryption
from ...orchestration.handshakes import HandshakeAcceptor
from ...orchestration.security import HandshakeResult
from . import tcp
from .epochs import Epochs

log = logging.getLogger("bpsfast.node")


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
    encryption
        Which of this job's connections are encrypted.
    """

    def __init__(self, listener: socket.socket, key: bytes, mine: int, epochs: Epochs,
                 came: Callable[[socket.socket, HandshakeResult], None], n_expected: int,
                 encryption: Encryption = Encryption.NONE) -> None:
        self._door = HandshakeAcceptor(
            listener, lambda sock: tcp.accept(sock, key, mine=mine, epochs=epochs, encryption=encryption), came,
            self._refused, lambda words: log.warning("data port: %s", words), n_expected,
            "bpsfast-data-port")
        self._lock = threading.Lock()
        self._n_refused = 0

    def start(self) -> None:
        """Begin to accept."""
        self._door.start()

    def close(self) -> None:
        """Accept nobody any more; end what strangers have begun. Idempotent."""
        self._door.close()

    def _refused(self, why: Exception) -> None:
        with self._lock:
            self._n_refused += 1
            number = self._n_refused
        if number <= 8 or number & (number - 1) == 0:  # a flood would fill the disk
            log.log(logging.DEBUG if self._door.is_closed else logging.WARNING, "refused a data connection: %s%s", why,
                    f" ({number} were by now)" if number > 8 else "")
