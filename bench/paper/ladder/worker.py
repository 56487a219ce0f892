"""The worker of `bench ladder`, which pushes the gradient list, waits for the results, and measures."""
from __future__ import annotations

import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from bpsfast.bench.paper.ladder import control, shares
from bpsfast.bench.paper.ladder.contestant import LadderEnd, Side, Streams, Writes
from bpsfast.bench.paper.ladder.control import Control
from bpsfast.bench.paper.ladder.device import Port
from bpsfast.bench.paper.ladder.exchange import WriteExchange
from bpsfast.bench.paper.ladder.memory import Area
from bpsfast.bench.paper.ladder.service import check, greeting
from bpsfast.bench.paper.ladder.shares import OURS, VARIANTS, LadderVariant

_TURN_S = 0.5
_MAX_STEPS = 20
_PROBE_STEPS = 500


@dataclass
class Row:
    """Results of one variant with one model. For each turn: steps, CPU seconds of both processes and of all CPUs."""

    variant: LadderVariant
    n_parts: int
    nbytes: int
    samples_s: list[float] = field(default_factory=list)
    n_steps: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    n_wrong: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.samples_s)

    def quartiles_s(self) -> tuple[float, float]:
        """Return the first and third quartile of a step's seconds; both are its time if there is one step."""
        if len(self.samples_s) < 2:
            return self.samples_s[0], self.samples_s[0]
        first, _, third = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return first, third

    def turns_s(self) -> list[float]:
        """Return the median seconds of a step for each turn."""
        steps = iter(self.samples_s)
        return [statistics.median(next(steps) for _ in range(n)) for n in self.n_steps]

    def per_gigabyte(self, seconds: list[float]) -> float:
        """Return *seconds* (one value for each turn) per 10^9 bytes of the list."""
        return sum(seconds) / (sum(self.n_steps) * self.nbytes / 1e9)


class Worker(LadderEnd):
    """The worker of one connection. Owner thread only; `close` ends the service, too."""

    def __init__(self, connection: Control, port: Port) -> None:
        super().__init__(connection, port)
        self.own = greeting(port.rail.name)
        connection.send(self.own)
        self.peer = connection.expect(control.Hello)
        check(self.peer, connection.peer)

    def latency_s(self) -> float:
        """Return the median time of a WRITE_WITH_IMM of 8 bytes with both ends polling: half the round trip."""
        self._open(shares.Model(shares.PROBE), 1 << 20)
        self._make(OURS, polls=True)
        rows = [self._turn(Row(OURS, 1, 8), n) for n in (_PROBE_STEPS // 10, _PROBE_STEPS)]
        self.close_model()
        return rows[-1].median_s / 2

    def measure(self, model: shares.Model, partition_nbytes: int, n_rounds: int,
                say: Callable[[str], None]) -> list[Row]:
        """Return the rows of all variants; each has a turn in every round, and results are checked after each turn."""
        parts = self._open(model, partition_nbytes)
        rows = [Row(variant, len(parts), sum(part.nbytes for part in parts)) for variant in VARIANTS]
        for variant in VARIANTS:
            self._make(variant)
        for number in range(n_rounds):
            for row in rows:
                n = int(_TURN_S / row.median_s) if row.samples_s else 1
                self._turn(row, max(1, min(_MAX_STEPS, n)))
            say(f"{model}: round {number + 1} of {n_rounds}: " + ", ".join(f"{row.samples_s[-1]:.3g}" for row in rows))
        for row in rows:
            loop = self._contestants[row.variant.name].loop
            row.counters = loop.counters() if isinstance(loop, WriteExchange) else {}
        self.close_model()
        return rows

    def _open(self, model: shares.Model, partition_nbytes: int) -> list[shares.Part]:
        """Allocate the memory of a model at both ends."""
        parts = shares.parts_of(model, partition_nbytes)
        own = [part for part in parts if not part.remote]
        domain = self._port.domain
        source, result, stage = self._areas = [Area(domain, parts) for _ in range(3)]
        source.fill()
        indices = {remote: [i for i, part in enumerate(parts) if part.remote == remote] for remote in (True, False)}
        at_service = shares.offsets([part for part in parts if part.remote])[0]
        self._side = Side(False, source, result, stage, indices[True], at_service)
        self._own: list[Side] = []
        if own:
            slots, staging = (Area(domain, own) for _ in range(2))
            self._areas += [slots, staging]
            at_worker = [source.offsets[i] for i in indices[False]]
            self._own = [Side(False, source, result, stage, indices[False], slots.offsets),
                         Side(True, slots, slots, staging, range(len(own)), at_worker)]
        self._control.send(control.Open(model.name, model.divisor, partition_nbytes))
        self._control.expect(control.Opened)
        return parts

    def _make(self, variant: LadderVariant, polls: bool = False) -> None:
        """Make a variant's contestant at both ends, and connect the two."""
        own = self._own if variant.own_by_wire else []
        if variant.is_tcp:
            self._control.send(control.Make(variant.name))
            made = self._control.expect(control.Made)
            sockets = [socket.create_connection((self._control.peer, made.port), timeout=control.CONNECT_TIMEOUT_S)
                       for _ in range(made.n_streams)]
            self._contestants[variant.name] = Streams(self._side, sockets, own)
            return
        writes = Writes(self._port, variant, self._side, own, polls)
        self._contestants[variant.name] = writes
        self._control.send(control.Make(variant.name, writes.offer(), polls))
        made = self._control.expect(control.Made)
        assert made.offer is not None
        writes.connect(made.offer)

    def _turn(self, row: Row, n_steps: int) -> Row:
        """Do *n_steps* steps one after another; the memory that they fill is cleared before and checked after them."""
        variant = row.variant
        source, result = self._areas[:2]
        for area in self._areas[1:]:
            area.clear()
        self._control.send(control.Run(variant.name, n_steps))
        self._control.expect(control.Ready)
        turn = self._contestants[variant.name].run(n_steps)
        ran = self._control.expect(control.Ran)
        moved = [part.remote or variant.own_by_wire for part in result.parts]
        row.n_wrong += ran.n_wrong + result.n_wrong(variant.unaligned, moved, source.offsets)
        row.samples_s += turn.samples_s
        row.n_steps.append(n_steps)
        row.cpu_s.append(turn.cpu_s + ran.cpu_s)
        # one kernel counts for both ends
        row.busy_s.append(max(turn.busy_s, ran.busy_s) if self.own.boot == self.peer.boot
                          else turn.busy_s + ran.busy_s)
        return row

    def close(self) -> None:
        """Release everything and close the connection."""
        self.close_model()
        self._control.close()
