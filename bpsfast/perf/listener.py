"""The side of ``bpsfast ping`` that listens: answers, opens queue pairs, and pings others for whoever asks.

One thread for each client, so that a host that pings another one for a client can itself be pinged meanwhile.
"""
from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from typing import Any

from ..nic.host import Host
from ..orchestration.errors import BpsError, ConfigError
from ..settings import Settings
from . import control as lines, reach
from .control import Control
from .messages import Alive, Answer, Ask
from .rdma import RdmaEnd

_log = logging.getLogger("bpsfast")
_SILENCE_S = 60.0
_ALIVE_S = 1.0
_MOST_CLIENTS = 32
#: How long nobody is let in after that has failed, for want of file descriptors for example.
_DEAF_S = 1.0


def serve(listener: socket.socket, key: bytes, loaded: Settings) -> None:
    """Answer clients until the socket is shut down or the process is interrupted; strangers get nothing."""
    places = threading.BoundedSemaphore(_MOST_CLIENTS)
    listener.settimeout(None)
    while True:
        try:
            sock, _ = listener.accept()
        except OSError as exc:
            if exc.errno in (errno.EBADF, errno.EINVAL):
                return  # shut down
            if exc.errno != errno.ECONNABORTED:  # he has gone again
                _log.warning("ping: nobody can be let in: %s; it is tried again every %g s", exc, _DEAF_S)
                time.sleep(_DEAF_S)  # else it would be announced again at once
            continue
        if not places.acquire(blocking=False):
            sock.close()
            continue
        threading.Thread(target=_client, args=(sock, key, loaded, places), name="bpsfast-ping", daemon=True).start()


def _client(sock: socket.socket, key: bytes, loaded: Settings, places: threading.BoundedSemaphore) -> None:
    try:
        with lines.greet(sock, key, _SILENCE_S) as control:
            _Client(control, key, loaded).run()
    except BpsError as exc:
        _log.info("ping: %s", exc)
    finally:
        places.release()


class _Client:
    """One connection: its questions in order, and the queue pair that it opened last."""

    def __init__(self, control: Control, key: bytes, loaded: Settings) -> None:
        self._control, self._key, self._settings = control, key, loaded
        self._host = Host()
        self._end: RdmaEnd | None = None
        self._rails: list[Any] = []

    def run(self) -> None:
        try:
            while True:
                asked = self._control.receive(Ask, "a question")
                try:
                    answer = self._answer(asked)
                except (BpsError, OSError, KeyError) as exc:
                    answer = {"error": f"{type(exc).__name__}: {exc}"}
                self._control.send(Answer(answer))
        finally:
            self._close()

    def _answer(self, asked: Ask) -> dict[str, Any]:
        if asked.what == "echo":
            return {}
        if asked.what == "rails":
            return self._list()
        if asked.what == "open":
            self._close()
            self._end = end = reach.open_end(self._rails[asked.fields["rail"]], self._host,
                                              self._settings.verbs)
            end.connect(asked.fields["offer"])
            end.prepare(8, receives=True)
            return {"offer": end.offer()}
        if asked.what == "turns" and self._end is not None:
            self._end.latency(asked.fields["n"], first=False)
            return {}
        if asked.what == "reach":
            return self._reach(**asked.fields)
        raise ConfigError(f"{asked.what!r} is no question that this version knows, or not now")

    def _list(self) -> dict[str, Any]:
        try:
            self._rails, rejected = reach.rails(self._host, self._settings, self._control.peer_host)
        except ConfigError as exc:
            self._rails, rejected = [], {"settings": str(exc)}
        return {"host": os.uname().nodename, "rails": [reach.described(rail) for rail in self._rails],
                "rejected": rejected}

    def _reach(self, host: str, port: int) -> dict[str, Any]:
        """Ping another listener; that takes its time, so whoever asked hears that we live."""
        found: list[dict[str, Any]] = []
        worker = threading.Thread(
            target=lambda: found.append(reach.reach(host, port, self._key, self._settings, wait_s=5.0)), daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(_ALIVE_S)
            self._control.send(Alive())
        return found[0]

    def _close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
