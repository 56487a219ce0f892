"""The service of `bench ladder`, which receives partitions in its slots and sends them back."""
from __future__ import annotations

import socket
import sys
import time

import numpy as np

from bpsfast.base import settings
from bpsfast.base.process_identity import boot_id
from bpsfast.bench.harness import machine_info
from bpsfast.bench.paper.ladder import control, shares
from bpsfast.bench.paper.ladder.contestant import LadderEnd, Side, Streams, Writes, accept
from bpsfast.bench.paper.ladder.control import Control
from bpsfast.bench.paper.ladder.device import Port, usable
from bpsfast.bench.paper.ladder.memory import Area
from bpsfast.bench.paper.ladder.shares import BY_NAME, LadderVariant
from bpsfast.orchestration.errors import BpsError, MismatchError, ProtocolError
from bpsfast.tools.perf.control import listen_address
from bpsfast.tools.planner.catalog import MODELS

_MEMCPY_NBYTES = 64 << 20


def serve(address: str, port: int, device: str) -> None:
    """Listen at *address* ("": everywhere) for one worker, serve it, and return when it closes the connection.

    Errors here (`BpsError`, `OSError`) are sent to the worker and raised.
    """
    gid_index = settings.load({}).rdma_gid_index
    usable(device, gid_index)  # fails before a worker waits for this end
    place = listen_address(settings.load({}), address)
    with socket.create_server((place.host, port)) as server:
        print(f"ladder: listening at {place.host or '*'}:{port}{place.remark}", file=sys.stderr, flush=True)
        connection = control.accept(server, place.secret)
    try:
        rail = usable(device, gid_index, connection.peer)[0]
        with Port(rail) as opened:
            serving = Service(connection, opened)
            try:
                serving.run()
            finally:
                serving.close_model()
    except (BpsError, OSError, ValueError, MemoryError) as exc:
        connection.send(control.Failed(f"{type(exc).__name__}: {exc}"))
        raise
    finally:
        connection.close()


def greeting(device: str) -> control.Hello:
    """Return this end's hello."""
    return control.Hello(control.FORMAT, boot_id(), device, machine_info.describe(), memcpy_bandwidth())


def check(hello: control.Hello, peer: str) -> None:
    """Raise MismatchError unless *hello* speaks our format."""
    if hello.format != control.FORMAT:
        raise MismatchError(f"{peer} speaks format {hello.format} of the ladder, this end {control.FORMAT}: install "
                            "the same version of bpsfast on both")


def memcpy_bandwidth() -> float:
    """Return the bytes per second that one thread copies from DRAM, the median of five copies of 64 MiB."""
    source, target = (np.ones(_MEMCPY_NBYTES, np.uint8) for _ in range(2))
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        samples.append(time.perf_counter() - begin)
    return _MEMCPY_NBYTES / float(np.median(samples))


class Service(LadderEnd):
    """The service of one connection. Owner thread only."""

    def __init__(self, connection: Control, port: Port) -> None:
        super().__init__(connection, port)
        self._begins: list[int] = []
        self._side: Side | None = None

    def run(self) -> None:
        """Serve the worker's requests until it closes the connection."""
        hello = self._control.expect(control.Hello)
        self._control.send(greeting(self._port.rail.name))
        check(hello, self._control.peer)
        while (message := self._control.receive(None)) is not None:
            if isinstance(message, control.Open) and message.divisor > 0 and message.model in (*MODELS, shares.PROBE):
                self._open(message)
            elif isinstance(message, control.Make) and message.variant in BY_NAME and self._side is not None:
                self._make(self._side, BY_NAME[message.variant], message.offer, message.polls)
            elif isinstance(message, control.Run) and message.variant in self._contestants:
                self._run(BY_NAME[message.variant], message.n_steps)
            else:
                raise ProtocolError(f"{self._control.peer} asked for {message}: unknown here, or not its turn")

    def _open(self, message: control.Open) -> None:
        self.close_model()
        parts = shares.parts_of(shares.Model(message.model, message.divisor), message.partition_nbytes)
        at_worker = shares.offsets(parts)[0]
        mine = [part for part in parts if part.remote]
        self._begins = [at for at, part in zip(at_worker, parts) if part.remote]
        self._areas = [Area(self._port.domain, mine) for _ in range(2)]
        slots, stage = self._areas
        self._side = Side(True, slots, slots, stage, range(len(mine)), self._begins)
        self._control.send(control.Opened())

    def _make(self, side: Side, variant: LadderVariant, offer: control.Offer | None, polls: bool) -> None:
        if offer is not None:
            writes = Writes(self._port, variant, side, polls=polls)
            self._contestants[variant.name] = writes
            writes.connect(offer)
            self._control.send(control.Made(offer=writes.offer()))
            return
        with socket.create_server((self._control.address, 0)) as server:
            n_streams = settings.load({}).tcp_streams
            self._control.send(control.Made(port=server.getsockname()[1], n_streams=n_streams))
            sockets = accept(server, n_streams)
        self._contestants[variant.name] = Streams(side, sockets)

    def _run(self, variant: LadderVariant, n_steps: int) -> None:
        slots, stage = self._areas
        slots.clear()
        stage.clear()
        self._control.send(control.Ready())
        turn = self._contestants[variant.name].run(n_steps)
        n_wrong = slots.n_wrong(variant.unaligned, [True] * len(self._begins), self._begins)
        self._control.send(control.Ran(turn.cpu_s, turn.busy_s, n_wrong))
