"""The side of ``bpsfast ping`` that listens: answers, opens queue pairs, and pings others for whoever asks.

One thread for each client, so that a host that pings another one for a client can itself be pinged meanwhile.
"""
from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Any

from ...base.settings import Settings
from ...hardware.host import Host
from ...orchestration.errors import BpsError, ConfigError
from . import control as lines, ping
from .control import Control, Secret
from .messages import Alive, Answer, Ask
from .rdma import RdmaEnd

_log = logging.getLogger("bpsfast")
_CLIENT_SILENCE_S = 60.0
_ALIVE_S = 1.0
_MOST_CLIENTS = 32


def serve(listener: socket.socket, secret: Secret, loaded: Settings) -> None:
    """Answer clients until the socket is shut down or the process is interrupted; strangers get nothing."""
    places = threading.BoundedSemaphore(_MOST_CLIENTS)

    def came(control: Control) -> None:
        with control:
            if not places.acquire(blocking=False):
                return control.stop(f"it has {_MOST_CLIENTS} clients already, more are not let in")
            try:
                _Client(control, secret, loaded).run()
            except BpsError as exc:
                _log.info("ping: %s", exc)
            finally:
                places.release()

    door = lines.handshake_acceptor(listener.dup(), secret.key, _CLIENT_SILENCE_S, came, lambda exc: _log.info("ping: %s", exc),
                         lambda words: _log.warning("ping: %s", words), "bpsfast-ping")
    with contextlib.closing(door):
        door.start()
        door.wait()


class _Client:
    """One connection: its questions in order, and the queue pair that it opened last."""

    def __init__(self, control: Control, secret: Secret, loaded: Settings) -> None:
        self._control, self._secret, self._settings = control, secret, loaded
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
            self._end = end = ping.open_end(self._rails[asked.fields["rail"]], self._host,
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
            self._rails, rejected = ping.rails(self._host, self._settings, self._control.peer_host)
        except ConfigError as exc:
            self._rails, rejected = [], {"settings": str(exc)}
        return {"host": os.uname().nodename, "rails": [ping.described(rail) for rail in self._rails],
                "rejected": rejected}

    def _reach(self, host: str, port: int) -> dict[str, Any]:
        """Ping another listener for a holder of the key, who hears meanwhile that we live."""
        if self._secret.is_public:  # anybody may have asked: what is found would tell him which ports are open
            raise ConfigError("under BPSFAST_INSECURE=1 a listener pings nobody for others: set BPSFAST_JOB_KEY to the "
                              "same random hex on all hosts (openssl rand -hex 32)")
        found: list[dict[str, Any]] = []
        key = self._secret.key
        worker = threading.Thread(
            target=lambda: found.append(ping.reach(host, port, key, self._settings, wait_s=5.0)), daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(_ALIVE_S)
            self._control.send(Alive())
        return found[0]

    def _close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
