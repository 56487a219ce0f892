"""P2P endpoints of one process: ranks of a job without scheduler and nodes."""
from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

from bpsfast.base.settings import load
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.orchestration.errors import ClosedError, StallError
from tests.support.loopback import LOOPBACK

KEY = bytes(range(32))


class Endpoints:
    """*size* endpoints; *by_network*: as if each were on a node of its own. Close it."""

    def __init__(self, size: int = 2, by_network: bool = False, **values: object) -> None:
        self.settings = load({"timeout_s": 20, "transport": "tcp" if by_network else "auto", "node_host": LOOPBACK,
                              **values}, {})
        self.board: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.aborted: Exception | None = None
        self.endpoints = [P2PEndpoint(self._session(rank, size, by_network)) for rank in range(size)]

    def _session(self, rank: int, size: int, by_network: bool) -> SimpleNamespace:
        return SimpleNamespace(
            rank=rank, size=size, host=LOOPBACK, node=rank if by_network else 0, n_nodes=size if by_network else 1,
            settings=self.settings, role=SimpleNamespace(job_key=KEY), pid=os.getpid(), require_open=lambda: None,
            port=SimpleNamespace(check=self._check), key_values=SimpleNamespace(
                publish=self._publish, lookup=self._lookup, withdraw=lambda prefix: None))

    def _check(self) -> None:
        if self.aborted is not None:
            raise self.aborted

    def _publish(self, key: str, value: bytes) -> None:
        with self.changed:
            self.board[key] = value
            self.changed.notify_all()

    def _lookup(self, key, timeout_s, who, given_up):
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while key not in self.board:
                if given_up():
                    raise ClosedError("given up")
                if time.monotonic() >= deadline:
                    raise StallError(f"{who} has not published {key!r}")
                self.changed.wait(0.02)  # then check for cancellation again
            return self.board[key]

    def close(self) -> None:
        """Close all endpoints, at the same time, as ranks do."""
        threads = [threading.Thread(target=endpoint.close) for endpoint in self.endpoints]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
