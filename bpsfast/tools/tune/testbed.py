"""For ``bpsfast tune rdma``: runs `perf` between the machines, on the driving side and on the listening side.

A measurement runs `perf` over one or more pairs of rails at once, each over a connection of its own. Nothing is kept
between measurements, so the next one notices a dead machine.
"""
from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ...base.settings import Settings
from ...hardware.host import Host
from ...orchestration.errors import BpsError, PeerLostError, StallError
from ...orchestration.host_lookup import format_address
from ..perf.control import Answer, Ask, Control, Propose, connect, serving
from ..perf.perf_plan import Plan
from ..perf.perf_run import PerfRun
from . import tunables
from .search import ConfigRefusedError
from .tunables import HostCapabilities, RailCapabilities

DEFAULT_PORT = 18530
#: Longest wait for a machine that answered before.
_AGAIN_S = 10.0
_LOOK_S = 0.2
_LAST_WORDS_S = 10.0
#: Most waits of a perf run, each with the deadline of silence.
_STEPS = 6


class RailPair(NamedTuple):
    """A pair of rails: to which machine (its index), from which rail here, to which rail there."""

    partner: int
    own: RailCapabilities
    their: RailCapabilities


class TuneTestbed:
    """The other machines, which listen: waits *wait_s* for one, and calls it stalled after *timeout_s*. One thread."""

    def __init__(self, where: Sequence[tuple[str, int]], key: bytes, loaded: Settings, wait_s: float,
                 timeout_s: float) -> None:
        self._where, self._key, self._settings = list(where), key, loaded
        self._wait_s, self._timeout_s = wait_s, timeout_s
        #: this machine, read once because that takes longer than many measurements
        self.own = Host()

    def ask(self, what: str) -> list[HostCapabilities]:
        """Ask every machine for its "facts", or tell it the "end"; raise `BpsError` if one fails or does not answer."""
        found = []
        for host, port in self._where:
            with connect(host, port, self._key, self._wait_s, self._timeout_s) as control:
                control.send(Ask(what, {}))
                answer = control.receive(Answer, f"its answer to {what}").fields
                control.stop()
            if answer.get("error"):
                raise BpsError(f"{host}: {answer['error']}")
            if what == "facts":
                found.append(msgspec.convert(answer, HostCapabilities))
        return found

    def measure(self, plan: Plan, ways: Sequence[RailPair]) -> list[dict[str, Any]]:
        """Run *plan* on all *ways* at once; return the row of each.

        Raises `ConfigRefusedError` if these settings cannot be measured but every machine still answers, and
        `PeerLostError` if one is gone.
        """
        with contextlib.ExitStack() as stack:
            controls = [stack.enter_context(self._connect(way.partner, self._wait_s)) for way in ways]
            return self._together(plan, ways, controls)

    def _connect(self, partner: int, wait_s: float) -> Control:
        host, port = self._where[partner]
        try:
            return connect(host, port, self._key, wait_s, self._timeout_s)
        except (BpsError, OSError) as exc:
            raise PeerLostError(f"{format_address(host, port)} does not listen any more: {exc}") from exc

    def _together(self, plan: Plan, ways: Sequence[RailPair], controls: Sequence[Control]) -> list[dict[str, Any]]:
        barrier = threading.Barrier(len(ways))
        rows: list[dict[str, Any] | None] = [None] * len(ways)
        errors: list[tuple[int, Exception]] = []

        def meet() -> None:
            try:
                barrier.wait(self._timeout_s)
            except threading.BrokenBarrierError:
                raise _OthersError("another machine of the same measurement failed") from None

        def run(number: int) -> None:
            way = ways[number]
            own = msgspec.structs.replace(self._settings, rdma_devices=f"={way.own.name}")
            try:
                measured = PerfRun(controls[number], self._key, own, lambda row: None, meet, self.own)
                measured.as_client(plan, lambda: None, way.their.name)
                rows[number] = measured.rows[0]
            except Exception as exc:  # reported below, in the calling thread
                errors.append((number, exc))
                barrier.abort()

        threads = [threading.Thread(target=run, args=(number,), name=f"bpsfast-tune-{number}", daemon=True)
                   for number in range(len(ways))]
        for thread in threads:
            thread.start()
        limit_s = plan.duration_s + _STEPS * self._timeout_s
        deadline = time.monotonic() + limit_s
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    if time.monotonic() > deadline:
                        hosts = ", ".join(host for host, _ in self._where)
                        raise StallError(f"a measurement with {hosts} did not end within {limit_s:g} s. Nothing "
                                         "was changed")
        except BaseException as exc:
            for control in controls:
                control.abort(f"it was interrupted ({exc})" if str(exc) else "it was interrupted (Ctrl-C)")
            for thread in threads:
                thread.join(_LAST_WORDS_S)
            raise
        if errors:
            self._explain(ways, errors)
        return [row for row in rows if row is not None]

    def _explain(self, ways: Sequence[RailPair], errors: Sequence[tuple[int, Exception]]) -> None:
        """Raise the error for the user: impossible settings, or a lost machine."""
        number, error = next((each for each in errors if not isinstance(each[1], _OthersError)), errors[0])
        if not isinstance(error, BpsError | OSError | ValueError):
            raise error
        host = self._where[ways[number].partner][0]
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        for partner in sorted({way.partner for way in ways}):
            try:
                with self._connect(partner, _AGAIN_S) as control:
                    control.send(Ask("facts", {}))
                    control.receive(Answer, "a sign of life")
                    control.stop()
            except (BpsError, OSError) as exc:
                raise PeerLostError(f"the measurement with {host} ended: {words}; and then {exc}. Nothing was "
                                    "changed") from exc
        raise ConfigRefusedError(words) from error


class _OthersError(BpsError):
    """A perf run that ended because another one of the same measurement failed."""

_SILENCE_S = 60.0
_MOST_AT_ONCE = 64


class TuneServer:
    """The listening side: reports what this machine offers, and is measured. `serve` in one thread.

    Each measurement has a connection and a thread of its own, because several rails are measured at once. *say* is
    called from any thread with messages for the user.
    """

    def __init__(self, listener: socket.socket, key: bytes, loaded: Settings, say: Callable[[str], None]) -> None:
        self._listener, self._key, self._settings, self._say = listener, key, loaded, say
        self._host = Host()
        self._ended = threading.Event()
        self._heard_s = time.monotonic()
        self._driver = ""
        self._at_work = 0
        self._lock = threading.Lock()

    def serve(self, wait_s: float) -> None:
        """Serve until the other side is done; refuse strangers.

        Raises `StallError` if no client came within *wait_s* seconds; `PeerLostError` if one came, and then none for
        *wait_s* seconds.
        """
        self._heard_s = time.monotonic()
        with serving(self._listener, self._key, _SILENCE_S, _MOST_AT_ONCE, "tune", self._client):
            silent_s = 0.0
            while silent_s < wait_s:
                if self._ended.wait(_LOOK_S):
                    return
                with self._lock:
                    silent_s = 0.0 if self._at_work else time.monotonic() - self._heard_s
        if self._driver:
            raise PeerLostError(f"{self._driver} has measured nothing for {wait_s:g} s without ending the run: its "
                                "process is gone, and its own output says why. Nothing was changed here")
        raise StallError(f"nobody connected within {wait_s:g} s to port {self._listener.getsockname()[1]}: start "
                         "`bpsfast tune rdma` with this host's name on the other one")

    def _client(self, control: Control) -> None:
        with self._lock:
            self._at_work += 1
        try:
            if not self._driver:
                self._say(f"measured from {control.peer_host}")
            self._driver = control.peer_host
            self._answer(control)  # impossible values are part of the search; the other side tells its user
        finally:
            with self._lock:
                self._at_work -= 1
                self._heard_s = time.monotonic()

    def _answer(self, control: Control) -> None:
        asked = control.receive((Ask, Propose), "a question or a measurement")
        if isinstance(asked, Propose):
            run = PerfRun(control, self._key, self._settings, lambda row: None, host=self._host)
            run.serve(asked, {}, lambda: None)
        elif asked.what == "facts":
            try:
                fields = msgspec.to_builtins(tunables.gather(self._host, self._settings, control.peer_host))
            except (BpsError, OSError) as exc:
                fields = {"error": f"{type(exc).__name__}: {exc}"}
            control.send(Answer(fields))
        elif asked.what == "end":
            control.send(Answer({}))
            self._say("the other side is done")
            self._ended.set()
        else:
            control.send(Answer({"error": f"{asked.what!r} is not a known question"}))
