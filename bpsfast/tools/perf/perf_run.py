"""Both sides of ``bpsfast perf bw`` and ``bpsfast perf lat``, step by step.

    client                                server
    Propose(plan)              ->                             refused with Stop if the server's options differ
                               <-         Agree
    for each provider of verbs:
      Offer                   <->         Offer               addresses of the ends; both connect
      for each size:
        Ready                 <->         Ready               receives are posted on both sides
        the loop of either side; the target of reads or writes has none
        Done                  <->         Done                messages sent, seconds taken, what the ports counted
        Result                 ->                             the row, shown on both sides
    Stop                       ->

Each side measures what it sends. While a loop runs in a thread, the main thread listens to the peer: an error on one
side ends both. A side that only waits receives `Alive` every second.
"""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ...base.settings import Settings
from ...hardware.host import Host
from ...hardware.nic_counters import difference
from ...hardware.rdma_route import choose, peer_address
from ...orchestration.errors import BpsError, PeerLostError, ProtocolError
from ...orchestration.wake_up import WakeUp
from . import perf_plan, results
from .control import REASON_S, Agree, Control, Done, Offer, Propose, Ready, Result, Sent, Stop
from .perf_plan import Plan
from .rdma import RdmaEnd
from .shm import ShmEnd
from .tcp import TcpEnd

_ALIVE_S = 1.0
_POLL_S = 0.05


class PerfRun:
    """One run over *control*, from either side. Calls *show* with each row.

    *key* is the job's, for data connections; *loaded* names the device and the GID. The client calls *gather* before
    each row when both sides are ready, and starts when it returns. *host*: this machine, if it has been read already.
    """

    def __init__(self, control: Control, key: bytes, loaded: Settings, show: Callable[[dict[str, Any]], None],
                 gather: Callable[[], None] = lambda: None, host: Host | None = None) -> None:
        self._control, self._key, self._settings, self._show = control, key, loaded, show
        self._gather = gather
        self._device = ""
        self._host = host or Host()
        self.rows: list[dict[str, Any]] = []
        self.places: dict[str, Any] = {}
        self.plan: Plan | None = None
        self._reported: BaseException | None = None

    def as_client(self, plan: Plan, began: Callable[[], None], device: str = "") -> None:
        """Measure *plan*; call *began* once both sides agree and are connected. An error is reported to the peer first.

        *device*: the server's port as "device:port", "" for its own choice.
        """
        with self._reporting():
            self.plan = plan
            self._control.send(Propose(plan, {"host": os.uname().nodename}, device))
            answer = self._control.receive(Agree, "the server's consent")
            self._each_provider(answer.place, is_client=True, began=began)
            self._control.stop()

    def as_server(self, given: dict[str, Any], began: Callable[[], None]) -> None:
        """Be measured as the client proposes, unless that contradicts *given*, the options of this side."""
        with self._reporting():
            self.serve(self._control.receive(Propose, "what to measure"), given, began)

    def serve(self, proposed: Propose, given: dict[str, Any], began: Callable[[], None]) -> None:
        """Be measured as *proposed*; otherwise as `as_server`."""
        with self._reporting():
            perf_plan.check(proposed.plan)
            perf_plan.agree(proposed.plan, given)
            self.plan, self._device = proposed.plan, proposed.device
            self._control.timeout_s = proposed.plan.timeout_s
            self._control.send(Agree({"host": os.uname().nodename}))
            self._each_provider(proposed.place, is_client=False, began=began)
            self._control.receive(Stop, "the end")

    @contextlib.contextmanager
    def _reporting(self) -> Any:
        """Report an error of this side to the peer once, before the measured connection ends."""
        try:
            yield
        except (KeyboardInterrupt, BpsError, OSError, ValueError) as exc:
            if exc is not self._reported:
                self._reported = exc
                self._control.stop("it was interrupted (Ctrl-C)" if isinstance(exc, KeyboardInterrupt)
                                   else f"{type(exc).__name__}: {exc}")
            raise

    def _each_provider(self, peer_place: dict[str, Any], is_client: bool, began: Callable[[], None]) -> None:
        assert self.plan is not None
        for provider in self.plan.providers if self.plan.transport == "rdma" else ("",):
            with contextlib.closing(self._end(provider, is_client)) as end, self._reporting():
                self._control.send(Offer(end.offer()))
                end.connect(self._control.receive(Offer, "the address of its end").fields)
                own = {"host": os.uname().nodename, **end.place()}
                self._control.send(Agree(own))
                theirs = {**peer_place, **self._control.receive(Agree, "its end's description").place}
                first = not self.places
                self.places = {"client": own if is_client else theirs, "server": theirs if is_client else own}
                if first:
                    began()
                for nbytes in self.plan.sizes:
                    self._measure(end, provider, nbytes, is_client)

    def _end(self, provider: str, is_client: bool) -> Any:
        plan, loaded = self.plan, self._settings
        assert plan is not None
        if plan.transport == "tcp":
            return TcpEnd(plan, self._control, self._key, not is_client, loaded.awake_us / 1e6)
        if plan.transport == "shm":
            return ShmEnd(plan, loaded.awake_us / 1e6, loaded.nontemporal_bytes)
        devices = f"={self._device}" if self._device and not is_client else loaded.rdma_devices
        choice = choose(self._host, msgspec.structs.replace(loaded, rdma_devices=devices),
                        peer_address(self._host, self._control.peer_host))
        return RdmaEnd(plan, choice.require()[0], provider, self._host)

    def _measure(self, end: Any, provider: str, nbytes: int, is_client: bool) -> None:
        plan, control = self.plan, self._control
        assert plan is not None
        sends = is_client != plan.reversed or plan.both_ways
        receives = plan.two_sided and (not sends or plan.both_ways or plan.verb == "lat")
        end.prepare(nbytes, receives)
        before = end.counters()
        self._meet(f"{nbytes} bytes", is_client)
        if plan.verb == "lat":
            n = plan.n_warmup + plan.iterations
            answers = is_client or plan.operation != "read"
            run = (lambda: end.latency(n, is_client)) if answers else None
        else:
            by_time = plan.duration_s > 0
            n_send = 0 if not sends else None if by_time else plan.iterations
            n_receive = 0 if not receives else None if by_time else plan.iterations * plan.pairs
            run = (lambda: end.bandwidth(n_send, n_receive, plan.duration_s)) if sends or receives else None
        measured, own, theirs = self._run(end, run, sends, before)
        row: dict[str, Any] = {"transport": plan.transport, "operation": plan.operation, "verbs": provider or None,
                               "nbytes": nbytes, "iterations": plan.iterations}
        if is_client:
            if plan.verb == "lat":
                row |= results.latency(measured, plan.n_warmup, halves=plan.operation != "read")
                row["n_warmup"] = plan.n_warmup
                row["samples_s"] = [ns / (1e9 if plan.operation == "read" else 2e9)
                                    for ns in memoryview(measured).cast("q")[plan.n_warmup:]]
            else:
                there, here = (results.bandwidth(nbytes, done.sent, done.seconds, done.peak) for done in (theirs, own))
                row |= results.both(here, there) if plan.both_ways else there if plan.reversed else here
            row["counters"] = {"client": own.counters, "server": theirs.counters}
            control.send(Result({name: value for name, value in row.items() if name != "samples_s"}))
        else:
            row = control.receive(Result, "the result").row
        self.rows.append(row)
        self._show(row)

    def _meet(self, step: str, is_client: bool) -> None:
        if not is_client:
            self._control.send(Ready(step))
        theirs = self._control.receive(Ready, step).step
        if is_client:
            self._gather()
            self._control.send(Ready(step))
        if theirs != step:
            raise ProtocolError(f"{self._control.peer} is at {theirs!r}, this side at {step!r}")

    def _run(self, end: Any, run: Callable[[], Any] | None, sends: bool, before: list[Any]) -> tuple[Any, Done, Done]:
        """Run the loop in a thread and listen to the peer; return the measurement, and both sides' `Done`."""
        control = self._control
        own: Done | None = None
        theirs: Done | None = None
        # in a run by time and both ways, a loop ends only when it knows how much the peer sent
        asked = self.plan is not None and self.plan.both_ways and self.plan.duration_s > 0
        with _BackgroundRun(run, end.cancel) as loop:
            loop.start()
            while own is None or theirs is None:
                # a passive side has counted everything once the peer is done
                if loop.ended and own is None and (run is not None or theirs is not None):
                    own = self._done(end, self._measured(loop), sends, before)
                    control.send(own)
                    continue
                if asked and not loop.ended and end.all_sent is not None:
                    asked = False
                    control.send(Sent(end.all_sent))
                message = control.receive((Done, Sent), "the end of its run", None if loop.ended else loop.fileno(),
                                          pulse_s=_POLL_S if asked else _ALIVE_S)
                if isinstance(message, Sent):
                    end.expect(message.n)
                elif message is not None:
                    theirs = message
                    if theirs.sent:
                        end.expect(theirs.sent)
            return self._measured(loop), own, theirs

    def _measured(self, loop: _BackgroundRun) -> Any:
        """Return the measurement, or raise its error; the peer's reason takes precedence."""
        try:
            return loop.value()
        except (BpsError, OSError) as exc:
            reason = self._control.reason(REASON_S if isinstance(exc, PeerLostError) else 0.0)
            if reason is not None:
                raise reason from exc
            raise

    def _done(self, end: Any, measured: Any, sends: bool, before: list[Any]) -> Done:
        counted = [{"device": delta.device, "port": delta.port, "seconds": delta.seconds,
                    "changes": dict(delta.changes), "line": delta.line(), "clean": delta.is_clean,
                    "verdicts": delta.verdicts()} for delta in map(difference, before, end.counters())]
        if isinstance(measured, tuple) and sends:
            sent, _, seconds, posted_ns, completed_ns = measured
            return Done(sent, seconds, results.peak_seconds(posted_ns, completed_ns), counted)
        return Done(0, 0.0, None, counted)


class _BackgroundRun:
    """A function in a thread (None: ended at once), and a descriptor that is readable once it has ended.

    Call `start` in the body of the ``with``, so that a Ctrl-C during it still ends the thread.
    """

    def __init__(self, run: Callable[[], Any] | None, cancel: Callable[[], None]) -> None:
        self._run, self._cancel = run, cancel
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = WakeUp()
        self._gate = threading.Lock()
        self._runs = self._closed = False
        self._thread = threading.Thread(target=self._main, name="bpsfast-perf") if run is not None else None
        self.ended = run is None

    def start(self) -> None:
        """Start the function."""
        if self._thread is not None:
            self._thread.start()

    def _main(self) -> None:
        assert self._run is not None
        with self._gate:
            if self._closed:
                return
            self._runs = True
        try:
            self._value = self._run()
        except BaseException as exc:
            self._error = exc
        self.ended = True
        self._ended.ring()

    def __enter__(self) -> _BackgroundRun:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._gate:
            self._closed = True
        if self._runs:
            assert self._thread is not None
            if not self.ended:
                self._cancel()
            self._thread.join()
        if exc[1] is not None and exc[1] is not self._error:
            self._error = None  # cancelled because of another error; this traceback would keep the loop's memory mapped
        self._ended.close()

    def fileno(self) -> int:
        return self._ended.fileno()

    def value(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value
