"""Who has said that all its ranks have left: over the data ports of peers, where no scheduler is there to tell them."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from ...base.encryption import Encryption
from ...orchestration.errors import BpsError
from ...orchestration.messages import NodeInfo
from ...orchestration.security import StreamHello
from . import tcp
from .epochs import Epochs
from .reconnector import SHUTDOWN_STREAM

log = logging.getLogger("bpsfast.node")


class PeerShutdowns:
    """Those of node *me* and of its *peers*, which may change. Any thread.

    Parameters
    ----------
    lease_s
        How long a peer may take to hear ours.
    begin
        Runs what it is given in a thread of its own.
    notify
        Called when `said` or `are_announced` may have changed.
    """

    def __init__(self, me: NodeInfo, peers: Mapping[int, NodeInfo], key: bytes, epochs: Epochs, lease_s: float,
                 encryption: Encryption, begin: Callable[[Callable[[], None]], None],
                 notify: Callable[[], None]) -> None:
        self._me = me
        self._peers = peers
        self._key = key
        self._epochs = epochs
        self._lease_s = lease_s
        self._encryption = encryption
        self._begin = begin
        self._notify = notify
        self._lock = threading.Lock()
        self._said: set[int] = set()
        self._to_be_told: set[int] = set()
        self._told: set[int] = set()  # or not to be reached

    def announce_shutdown(self) -> None:
        """Tell all peers that all ranks of this node have left. Once."""
        self._to_be_told = set(self._peers)
        for peer in list(self._peers.values()):
            self._begin(partial(self._say, peer))

    @property
    def are_announced(self) -> bool:
        """Whether all peers have been told so, but for those not to be reached."""
        return self._told >= self._to_be_told

    @property
    def said(self) -> set[int]:
        """Return the peers that have said so."""
        with self._lock:
            return set(self._said)

    def hear(self, hello: StreamHello) -> None:
        """Take a farewell that has proven the job's key, and is believed if it is of the node that it names."""
        with self._lock:
            peer = self._peers.get(hello.peer)
            is_its_own = peer is not None and bool(peer.ranks) and peer.pid == hello.pid
            if is_its_own:
                self._said.add(hello.peer)
        if is_its_own:
            self._notify()
        else:
            log.warning("process %d says that all ranks of node %d have left, and is not that node with ranks",
                        hello.pid, hello.peer)

    def _say(self, peer: NodeInfo) -> None:
        try:
            tcp.connect(peer.address, self._key, mine=self._me.index, peer=peer.index, number=SHUTDOWN_STREAM,
                        epochs=self._epochs, deadline=time.monotonic() + self._lease_s, pid=self._me.pid,
                        encryption=self._encryption)[0].close()
        except (BpsError, OSError) as exc:
            log.debug("node %d was not told that all ranks here have left: %s", peer.index, exc)
        with self._lock:
            self._told.add(peer.index)
