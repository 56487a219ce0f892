"""Endpoints in one process: ranks of a job without scheduler and nodes, with a minimal session."""
from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

from bpsfast.base.settings import load
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.orchestration.errors import ClosedError, StallError

KEY = bytes(range(32))


class Office:
    """*size* endpoints; with *far* they use the network, as if each had a separate node. Close it."""

    def __init__(self, size: int = 2, far: bool = False, **values: object) -> None:
        self.settings = load({"timeout_s": 20, "transport": "tcp" if far else "auto", "node_host": "127.0.0.1",
                              **values}, {})
        self.board: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.aborted: Exception | None = None
        self.posts = [P2PEndpoint(self._session(rank, size, far)) for rank in range(size)]

    def _session(self, rank: int, size: int, far: bool) -> SimpleNamespace:
        return SimpleNamespace(
            rank=rank, size=size, host="127.0.0.1", node=rank if far else 0, n_nodes=size if far else 1,
            settings=self.settings, place=SimpleNamespace(job_key=KEY), pid=os.getpid(), require_open=lambda: None,
            port=SimpleNamespace(check=self._check), notices=SimpleNamespace(
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
        """Close all endpoints at the same time, like ranks."""
        threads = [threading.Thread(target=post.close) for post in self.posts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
