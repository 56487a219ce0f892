"""The messages by which two nodes set up RDMA, over a connection of their own; none is sent in steady state.

    both      RdmaOffer    the ports to use, or why there are none
    both      RdmaPairs    numbers of the queue pairs, in the order of the streams
    both      RdmaStep     "connected": the step is done, or why it is not
    both      RdmaProven   the queue pairs over which a first write has passed
    both      PeerSlots    once per generation: where the other writes

The first four may carry an objection, which ends the attempt on both sides with the same error. Of a link that takes
the place of another one there are also:

    acceptor  LinkTaken    the acceptor's control loop has the link: it may be used
    both      LinkResumed  the sender has closed the old link: what it awaits, and where
    both      LinkClosed   the sender has closed this link, and seeks another one, maybe not by tcp
"""
from __future__ import annotations

import msgspec

from ....orchestration import messages
from ....orchestration.errors import DECODE_ERRORS, ProtocolError

#: Rises whenever a field changes its meaning.
VERSION = 2


class RailOffer(messages.Record):
    """One port: `gid` is empty on InfiniBand without a table, `version` v1, v2 or IB; `mtu` in bytes.

    By `network`, `position` and `is_on_route` (to the receiver's address) the ports of two nodes pair up. `gbps`: the
    port's rate in Gbit/s, 0 if unknown. `pkey`: its partition key, 0 if unknown.
    """

    device: str
    port: int
    link_layer: str
    gid: bytes
    version: str
    lid: int
    mtu: int
    position: int = 0
    gbps: float = 0.0
    network: str = ""
    is_on_route: bool = False
    pkey: int = 0


class RdmaOffer(messages.Message):
    """The ports that reach the receiver; `n_pairs` queue pairs on each."""

    version: int
    rails: tuple[RailOffer, ...] = ()
    n_pairs: int = 1
    objection: str = ""


class PairOffer(messages.Record):
    """One queue pair: number and first packet sequence number."""

    number: int
    psn: int


class RdmaPairs(messages.Message):
    """The queue pairs, one entry per stream."""

    pairs: tuple[PairOffer, ...] = ()
    objection: str = ""


class RdmaStep(messages.Message):
    """`step` is done on this side, unless there is an objection."""

    step: str
    objection: str = ""


class RdmaProven(messages.Message):
    """The queue pairs, by their place in `RdmaPairs`, over which a first write has passed in both directions."""

    pairs: tuple[int, ...] = ()
    objection: str = ""


class Slot(messages.Record):
    """Where the receiver writes `part`: addresses for even and odd rounds, the key of that memory, bytes.

    `framed`: at most so many bytes.
    """

    part: int
    even: int
    odd: int
    rkey: int
    nbytes: int
    framed: bool = False


class PeerSlots(messages.Message):
    """The parts of `generation` that the receiver writes to the sender: partials, or results that it owns."""

    generation: int
    slots: tuple[Slot, ...]


class LinkTaken(messages.Message):
    """The sender's control loop has the new link, on which this comes: the receiver may change over to it."""


class LinkResumed(messages.Message):
    """The sender has closed the old link and receives over the new one, on which this comes.

    `awaited`: part -> the round that has not arrived over the old link. `slots`: where the receiver writes, of every
    part that is bound: generations up to number `generation` need no `PeerSlots`. `link`: number of the last link that
    the sender has tried.
    """

    generation: int
    awaited: dict[int, int]
    slots: tuple[Slot, ...]
    link: int = 0


class LinkClosed(messages.Message):
    """The sender has closed the link on which this comes, and seeks another one: by tcp, or by RDMA only."""

    by_tcp: bool


RdmaMessage = RdmaOffer | RdmaPairs | RdmaStep | RdmaProven | PeerSlots | LinkTaken | LinkResumed | LinkClosed

_DECODER = msgspec.msgpack.Decoder(RdmaMessage)


def decode(data: bytes) -> messages.Message:
    """Return the message in *data*."""
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes on an rdma connection are no message: {exc}") from exc
