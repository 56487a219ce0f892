"""An RDMA link to one peer: its queue pairs, and the memory slots that are written over them in both directions.

    bind     this node expects a partition; `announce` sends the address to the peer
    aim      the peer expects partitions at these addresses
    fence    nothing passes any more; `bound` and `awaited` tell what was to come, for the link that replaces this one
    resumed  the message by which a link takes the place of another one: both sides bind first, then send it

A partition always uses the same stream, on both sides and in both directions; of rails that are not equally fast, one
that is twice as fast has twice as many partitions. `Rails` registers the memory of slots
before it is bound, and keeps it until the link is closed.
"""
from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....base.message_socket import MessageSocket
from ....base.trace_records import Limits
from ....orchestration.errors import CapacityError, PeerLostError, ProtocolError
from ....pyx import rdma as native
from ....pyx.dispatch import Dispatch
from ....pyx.engine import Engine
from ..links import WireLink
from . import failures
from .rails import PeerRail, Rail
from .rdma_messages import LinkResumed, PeerSlots, RdmaMessage, Slot

log = logging.getLogger("bpsfast.node")

#: Parts of the slowest rail's rate in which rates are compared.
_STEPS = 8
#: A write without an answer for so long, and for at least `lease_s`, has failed: a peer may be stopped for that long.
_PATIENCE_S = 30.0


@dataclass
class RailPath:
    """One queue pair over one rail, and its native stream. Owned by the link. `far`: the name of the peer's port."""

    route: PeerRail
    pair: Any
    stream: native.Stream
    far: str = ""
    _closing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rail(self) -> Rail:
        return self.route.rail

    @classmethod
    def over(cls, route: PeerRail, far: str, epoch: int, n_slots: int, limits: Limits) -> RailPath:
        """Return a new one, in state INIT; raises `CapacityError` if the rail has no room for it."""
        rail = route.rail
        rail.join()
        pair = None
        try:
            pair = rail.queue_pair(route.chosen.pkey_index)
            stream = native.Stream(rail.native, pair.handle, epoch=epoch, n_slots=n_slots, max_send=rail.depths.send,
                               max_receive=rail.depths.receive, inline_nbytes=rail.settings.rdma_inline_bytes,
                               signal_every=rail.settings.rdma_signal_every,
                               patience_s=max(_PATIENCE_S, rail.settings.lease_s), keep=pair, **limits._asdict())
        except BaseException:
            if pair is not None:
                pair.close()
            rail.leave()
            raise
        return cls(route, pair, stream, far)

    def describe(self, who: str) -> str:
        """Return why the stream has ended, as text."""
        port = self.route.port_now()  # first: it may notice the failure that caused the others
        return failures.describe(self.stream.failure(), who, self.rail.name, port)

    def close(self) -> None:
        """Destroy the queue pair: then nothing that the peer has under way reaches this node's memory.

        Idempotent; any thread. True on every return, whichever thread did it.
        """
        with self._closing:
            if not self.pair.closed:
                self.stream.close()
                self.pair.close()
                self.rail.leave()


class RdmaLink(WireLink):
    """An established pair of nodes. For the control loop's thread.

    *rates*: that of each path's rail, the same on both sides (Gbit/s, 0: unknown; none given: all are equal).
    """

    kind = "rdma"
    end_reason = "the connection of its rendezvous ended"

    def __init__(self, index: int, n_nodes: int, paths: Sequence[RailPath], channel: MessageSocket,
                 rates: Sequence[float] = ()) -> None:
        self.index = index
        self.channel = channel
        self.n_nodes = n_nodes
        self._paths = list(paths)
        self._turns = [self._paths[number] for number in turns_of(rates or [1.0] * len(paths))]
        self.streams = [path.stream for path in paths]
        self._fresh: dict[int, Slot] = {}
        self._n_exchanges = 0
        self.bound = {}  # n_streams counts if tcp replaces this link
        #: Generations up to this number need no `PeerSlots` of the peer.
        self.covered = -1
        self._anew: dict[int, int] = {}  # parts bound after the link has ended -> their next round
        self.fenced = False

    def start(self, engine: Engine, source: int, link_number: int = 0) -> None:
        for path in self._paths:
            path.stream.start(peer=source, engine=engine.handle, arrived=engine.arrived_address,
                           notify=engine.notify_address, number=link_number, keep=engine)

    def stream_of(self, part: int) -> native.Stream:
        """Return the stream of *part*, the same one in both directions and on both sides.

        Neighbouring parts have different owners and share a stream, so that each stream carries partials and results
        in both directions.
        """
        return self._path(part).stream

    def route(self, dispatch: Dispatch, source: int) -> None:
        dispatch.route(source, [path.stream for path in self._turns], n_nodes=self.n_nodes)

    def bind(self, part: int, even: int, odd: int, nbytes: int, n_streams: int = 0, framed: bool = False,
             first_round: int = 1) -> None:
        """Do as `WireLink.bind`; `announce` sends the addresses to the peer.

        Raises `CapacityError` if the device sends no message of this size.
        """
        if self.fenced:
            self._anew[part] = first_round
            self.bound[part] = even, odd, nbytes, n_streams, framed
            return
        path = self._path(part)
        if nbytes > path.rail.port["max_msg_sz"]:
            raise CapacityError(f"partition {part} has {nbytes} bytes, {path.rail.name} sends at most max_msg_sz="
                                f"{path.rail.port['max_msg_sz']} at a time: lower BPSFAST_PARTITION_BYTES")
        try:
            path.stream.bind(part, even, odd, nbytes, framed, first_round)
        except OSError as exc:
            raise CapacityError(f"partition {part} cannot be expected from node {self.index} over "
                                f"{path.rail.name}: {exc.strerror}") from exc
        self._fresh[part] = Slot(part=part, even=even, odd=odd, rkey=path.rail.rkey(min(even, odd), nbytes),
                                 nbytes=nbytes, framed=framed)
        if even != odd and path.rail.rkey(max(even, odd), nbytes) != self._fresh[part].rkey:
            raise ProtocolError(f"both copies of partition {part} lie in different segments: a bug of bpsfast")
        self.bound[part] = even, odd, nbytes, n_streams, framed

    def unbind(self, part: int) -> None:
        self._fresh.pop(part, None)
        self.bound.pop(part, None)
        self._anew.pop(part, None)
        if not self.fenced:
            self._path(part).stream.unbind(part)

    def announce(self, generation: int) -> None:
        """Send the peer the addresses of the parts that were bound since the last call: those of *generation*."""
        self._n_exchanges += 1
        self.tell(PeerSlots(generation=generation, slots=tuple(self._fresh.values())))
        self._fresh.clear()

    def resumed(self, generation: int, awaited: Mapping[int, int]) -> LinkResumed:
        """Return the message that announces all bound parts: those up to *generation*; *awaited*: see there."""
        slots, self._fresh = tuple(self._fresh.values()), {}
        return LinkResumed(generation=generation, awaited=dict(awaited), slots=slots)

    def aim(self, message: PeerSlots | LinkResumed) -> None:
        """Record where the peer expects the parts of one generation; ignored once the link is fenced."""
        self._n_exchanges += 1
        self.covered = max(self.covered, message.generation)
        if self.fenced:
            return
        for slot in message.slots:
            try:
                self.stream_of(slot.part).aim(slot.part, slot.even, slot.odd, slot.nbytes, slot.rkey, slot.framed)
            except ValueError as exc:
                raise ProtocolError(f"node {self.index} announced a slot that cannot be: {exc}") from exc

    def tell(self, message: RdmaMessage) -> None:
        """Post *message*, if the peer is still there; the end of the channel tells when it has ended."""
        if self.channel.fileno() < 0:
            return
        try:
            self.channel.post(message)
        except PeerLostError:
            log.debug("node %d had ended before it could be sent %s", self.index, type(message).__name__)

    def why(self, code: int) -> str:
        who = f"node {self.index}"
        found = [(path.describe(who), what) for path in self._paths if (what := path.stream.failure()) is not None]
        found.sort(key=lambda each: failures.is_consequence(each[1]))  # the cause before its consequences
        return found[0][0] if found else f"closed (code {code})"

    def fence(self) -> None:
        """Do as `WireLink.fence`: nothing that the peer has under way arrives, even if it is stopped. Any thread."""
        self.fenced = True
        for path in self._paths:
            try:
                path.close()
            except (OSError, BufferError) as exc:  # this stream is shut; the others have to be shut, too
                log.warning("a queue pair to node %d stays open: %s", self.index, exc)

    @property
    def rails(self) -> dict[str, str]:
        """The ports that carry it: this node's -> the peer's, in the same order on both sides."""
        return {path.rail.name: path.far for path in self._paths}

    @property
    def is_usable(self) -> bool:
        """Whether all memory is registered with its rails."""
        return not any(path.rail.is_closed for path in self._paths)

    @property
    def may_return(self) -> bool:
        """Whether a rail is open over which there may be another link to the peer."""
        return not all(path.rail.is_closed for path in self._paths)

    @property
    def is_cut_off(self) -> bool:
        # Only once every queue pair is destroyed, the peer cannot write any more.
        return self.fenced and all(path.pair.closed for path in self._paths)

    def next_round(self, part: int) -> int:
        anew = self._anew.get(part)
        return self.stream_of(part).next_round(part) if anew is None else anew

    def counters(self) -> dict[str, int]:
        """Return the sum of the streams' counters; `address_exchanges`: messages about slots, both ways.

        There are no damaged writes: cards check what they receive, and request it again.
        """
        return {"address_exchanges": self._n_exchanges, "queue_pairs": len(self._paths), "writes_damaged": 0,
                **super().counters()}

    def close(self) -> None:
        self.fence()
        self.channel.close()

    def _path(self, part: int) -> RailPath:
        return self._turns[part // self.n_nodes % len(self._turns)]


def turns_of(rates: Sequence[float]) -> list[int]:
    """Return which path is used in each turn: all as often as their *rates* say, to an eighth of the slowest one.

    Paths are equal if the rate of one is unknown (0). Turns of a path are spread evenly.
    """
    slowest = min(rates, default=0.0)
    weights = [round(_STEPS * rate / slowest) if slowest else 1 for rate in rates]
    divisor = math.gcd(*weights)
    # the k-th of a path's w turns comes at (k + 1/2) / w of all
    places = sorted(((k + 0.5) / weight, number) for number, each in enumerate(weights)
                    for weight in (each // divisor,) for k in range(weight))
    return [number for _, number in places]
