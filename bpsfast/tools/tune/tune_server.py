"""The side of ``bpsfast tune rdma`` that listens: says what it has, and is measured as often as the other side wants.

Every measurement has a connection of its own, served by a thread of its own, for several rails are measured at once.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from ...base.settings import Settings
from ...hardware.host import Host
from ...orchestration.errors import BpsError, PeerLostError, StallError
from ..perf import control as lines
from ..perf.control import Control
from ..perf.messages import Answer, Ask, Propose
from ..perf.perf_run import PerfRun
from . import capabilities

_log = logging.getLogger("bpsfast")
_SILENCE_S = 60.0
_MOST_AT_ONCE = 64


class TuneServer:
    """One listener. `serve` in one thread; *say* is called, from any, with what people should see."""

    def __init__(self, listener: socket.socket, key: bytes, loaded: Settings, say: Callable[[str], None]) -> None:
        self._listener, self._key, self._settings, self._say = listener, key, loaded, say
        self._host = Host()
        self._ended = threading.Event()
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._heard_s = time.monotonic()
        self._driver = ""
        self._at_work = 0
        self._lock = threading.Lock()

    def serve(self, wait_s: float) -> None:
        """Serve until the other side says that it is done; strangers get nothing.

        Raises
        ------
        StallError
            Nobody came within *wait_s* seconds.
        PeerLostError
            Somebody came, and then nobody for so long.
        """
        self._heard_s = time.monotonic()
        door = lines.handshake_acceptor(self._listener.dup(), self._key, _SILENCE_S, self._client,
                             lambda exc: _log.info("tune: %s", exc), lambda words: _log.warning("tune: %s", words),
                             "bpsfast-tune")
        with contextlib.closing(door):
            door.start()
            while not self._ended.wait(_LOOK_S):
                self._check_silence(wait_s)

    def _check_silence(self, wait_s: float) -> None:
        with self._lock:
            silent_s = 0.0 if self._at_work else time.monotonic() - self._heard_s
        if silent_s < wait_s:
            return
        if self._driver:
            raise PeerLostError(f"{self._driver} has measured nothing for {wait_s:g} s and did not say that it is "
                                "done: its process ended; its own output says why. Nothing was changed here")
        raise StallError(f"nobody came within {wait_s:g} s to port {self._listener.getsockname()[1]}: start `bpsfast "
                         "tune rdma` with this host's name on the other one")

    def _client(self, control: Control) -> None:
        with control:
            if not self._places.acquire(blocking=False):
                return control.stop(f"{_MOST_AT_ONCE} measurements are under way already")
            with self._lock:
                self._at_work += 1
            try:
                if not self._driver:
                    self._say(f"measured from {control.peer_host}")
                self._driver = control.peer_host
                self._answer(control)
            except (BpsError, OSError, ValueError) as exc:
                # values that cannot be are part of trying, and the other side tells its user
                _log.info("tune: %s", exc)
            finally:
                with self._lock:
                    self._at_work -= 1
                    self._heard_s = time.monotonic()
                self._places.release()

    def _answer(self, control: Control) -> None:
        asked = control.receive((Ask, Propose), "a question or a measurement")
        if isinstance(asked, Propose):
            visit = PerfRun(control, self._key, self._settings, lambda row: None, host=self._host)
            visit.serve(asked, {}, lambda: None)
        elif asked.what == "facts":
            try:
                fields = msgspec.to_builtins(capabilities.gather(self._host, self._settings, control.peer_host))
            except (BpsError, OSError) as exc:
                fields = {"error": f"{type(exc).__name__}: {exc}"}
            control.send(Answer(fields))
        elif asked.what == "end":
            control.send(Answer({}))
            self._say("the other side is done")
            self._ended.set()
        else:
            control.send(Answer({"error": f"{asked.what!r} is no question that this version knows"}))
