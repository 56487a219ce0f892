"""Both sides of ``bpsfast ping``: reach a peer over TCP, and over RDMA from every own port to every port of the peer.

A pair of ports is reached if 32 writes with immediate went there and came back; connecting proves nothing, as each
driver brings its queue pair up without the other side. This tells rail-only fabrics (port k reaches only port k), wrong
GIDs and too large MTUs apart.
"""
from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from ...base.settings import Settings
from ...hardware.host import Host
from ...hardware.rdma_route import Rail, choose, peer_address
from ...orchestration.errors import BpsError, ConfigError
from ...orchestration.host_lookup import format_address
from . import perf_plan
from .control import Alive, Answer, Ask, Control, Secret, connect, serving
from .rdma import RdmaEnd, described

DEFAULT_PORT = 18520
_N_ECHOES = 10
_TURNS = 32
_SILENCE_S = 20.0
#: Longest wait for a pair of ports that does not answer.
_PAIR_S = 4.0


def rails(host: Host, loaded: Settings, peer_host: str) -> tuple[list[Rail], dict[str, str]]:
    """Return the usable ports (of rdma_devices) towards *peer_host*, best first, and reasons against the others."""
    choice = choose(host, loaded, peer_address(host, peer_host))
    return [*choice.rails, *(() if loaded.rdma_devices else choice.spare)], dict(choice.rejected)


def open_end(rail: Rail, host: Host, verbs: str) -> RdmaEnd:
    """Return one end of a queue pair on *rail* for a few small messages, by the implementation *verbs*."""
    plan = perf_plan.make("lat", {"iterations": _TURNS, "depth": 16, "receive_depth": 64, "timeout_s": _PAIR_S})
    return RdmaEnd(plan, rail, verbs, host)


def reach(name: str, port: int, key: bytes, loaded: Settings, wait_s: float) -> dict[str, Any]:
    """Try to reach the listener at *name*:*port*; return the results, with errors as text. Never raises.

    ``tcp``: minimum and median round trip in seconds. ``pairs``: the same and the MTU, or ``error``, for each of our
    ports with each of the peer's. ``rejected``: unusable ports of either side, and why.
    """
    return _results((name, port), (name, port), key, wait_s, "",
                    lambda control, found: _measure(control, loaded, found))


def ask_to_reach(source: tuple[str, int], target: tuple[str, int], key: bytes, wait_s: float) -> dict[str, Any]:
    """Let the listener *source* reach the listener *target*; return the results with ``source``."""
    found = _results(source, target, key, wait_s, "the pinging host: ", lambda control, found: found.update(
        _ask(control, "reach", {"host": target[0], "port": target[1]})))
    return found | {"source": format_address(*source)}


def _results(server: tuple[str, int], target: tuple[str, int], key: bytes, wait_s: float, whose: str,
             fill: Callable[[Control, dict[str, Any]], None]) -> dict[str, Any]:
    """Connect to *server*; return the results about *target* that *fill* enters, or the error after *whose*."""
    found: dict[str, Any] = {"host": target[0], "port": target[1], "error": None, "tcp": None, "pairs": [],
                             "rejected": {}}
    try:
        with connect(*server, key, wait_s, _SILENCE_S) as control:
            fill(control, found)
            control.stop()
    except (BpsError, OSError) as exc:
        found["error"] = f"{whose}{type(exc).__name__}: {exc}"
    return found


def _ask(control: Control, what: str, fields: dict[str, Any]) -> dict[str, Any]:
    control.send(Ask(what, fields))
    return control.receive(Answer, f"the answer to {what!r}").fields


def _usable(host: Host, loaded: Settings, peer_host: str) -> tuple[list[Rail], dict[str, str]]:
    """Return `rails`; settings that contradict the machine are a reason against all ports."""
    try:
        return rails(host, loaded, peer_host)
    except ConfigError as exc:
        return [], {"settings": str(exc)}


def _measure(control: Control, loaded: Settings, found: dict[str, Any]) -> None:
    """Enter into *found* the round trips over TCP, and those between all pairs of ports."""
    times = []
    for _ in range(_N_ECHOES):
        before_s = time.perf_counter()
        _ask(control, "echo", {})
        times.append(time.perf_counter() - before_s)
    found["tcp"] = {"min_s": min(times), "median_s": statistics.median(times)}
    host = Host()
    own, rejected = _usable(host, loaded, control.peer_host)
    theirs = _ask(control, "rails", {})
    found["name"] = theirs["host"]
    found["rejected"] = {"here": rejected, "there": theirs["rejected"]}
    for rail in own:
        for number, peer in enumerate(theirs["rails"]):
            pair: dict[str, Any] = {"own": described(rail), "peer": peer, "mtu": None, "min_s": None, "median_s": None,
                                    "error": None}
            try:
                pair |= _pair(control, rail, number, host, loaded.verbs)
            except (BpsError, OSError) as exc:
                pair["error"] = f"{type(exc).__name__}: {exc}"
            found["pairs"].append(pair)


def _pair(control: Control, rail: Rail, number: int, host: Host, verbs: str) -> dict[str, Any]:
    with contextlib.closing(open_end(rail, host, verbs)) as end:
        answer = _ask(control, "open", {"rail": number, "offer": end.offer()})
        if answer.get("error"):
            return {"error": f"there: {answer['error']}"}
        end.connect(answer["offer"])
        end.prepare(8, receives=True)
        control.send(Ask("turns", {"n": _TURNS}))
        error = None
        try:
            samples = memoryview(end.latency(_TURNS, first=True)).cast("q")
        except (BpsError, OSError) as exc:
            error = f"{type(exc).__name__}: {exc}"
        answer = control.receive(Answer, "the end of its turns").fields
        if error or answer.get("error"):
            return {"error": error or f"there: {answer['error']}", "mtu": end.mtu}
        # the first round includes one-time costs of both sides
        return {"mtu": end.mtu, "min_s": min(samples[1:]) / 1e9, "median_s": statistics.median(samples[1:]) / 1e9}


_CLIENT_SILENCE_S = 60.0
_ALIVE_S = 1.0
_MOST_CLIENTS = 32


def serve(listener: socket.socket, secret: Secret, loaded: Settings) -> None:
    """Answer clients until the socket is shut down or the process is interrupted; refuse strangers."""
    with serving(listener, secret.key, _CLIENT_SILENCE_S, _MOST_CLIENTS, "ping",
                 lambda control: _Client(control, secret, loaded).run()) as acceptor:
        acceptor.wait()


class _Client:
    """One client: answers its questions in order, and keeps the last queue pair that it opened."""

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
            self._rails, rejected = _usable(self._host, self._settings, self._control.peer_host)
            return {"host": os.uname().nodename, "rails": [described(rail) for rail in self._rails],
                    "rejected": rejected}
        if asked.what == "open":
            self._close()
            self._end = end = open_end(self._rails[asked.fields["rail"]], self._host, self._settings.verbs)
            end.connect(asked.fields["offer"])
            end.prepare(8, receives=True)
            return {"offer": end.offer()}
        if asked.what == "turns" and self._end is not None:
            self._end.latency(asked.fields["n"], first=False)
            return {}
        if asked.what == "reach":
            return self._reach(**asked.fields)
        raise ConfigError(f"{asked.what!r} is not a known question, or not possible now")

    def _reach(self, host: str, port: int) -> dict[str, Any]:
        """Ping another listener for a client with the key, which receives `Alive` meanwhile."""
        if self._secret.is_public:  # with a public key anybody may ask, and the result would reveal open ports
            raise ConfigError("with BPSFAST_INSECURE=1 a listener does not ping for others: set BPSFAST_JOB_KEY to the "
                              "same random hex on all hosts (openssl rand -hex 32)")
        found: list[dict[str, Any]] = []
        worker = threading.Thread(target=lambda: found.append(
            reach(host, port, self._secret.key, self._settings, wait_s=5.0)), daemon=True)
        worker.start()
        while worker.is_alive():
            worker.join(_ALIVE_S)
            self._control.send(Alive())
        return found[0]

    def _close(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
