"""The messages by which two nodes set up RDMA, over a connection of their own; none is sent in steady state.

    both   RdmaOffer       the ports to use, or why there are none
    both   RdmaPairs       numbers of the queue pairs, in the order of the streams
    both   RdmaStep        "connected", then "proven": a step is done, or why it is not
    both   PeerSlots       once per generation: where the other writes

All but `PeerSlots` may carry an objection, which ends the attempt on both sides with the same error.
"""
from __future__ import annotations

import msgspec

from ....orchestration import messages
from ....orchestration.errors import DECODE_ERRORS, ProtocolError

#: Rises whenever a field changes its meaning.
VERSION = 1


class RailOffer(messages.Record):
    """One port: `gid` is empty on InfiniBand without a table, `version` v1, v2 or IB; `mtu` in bytes."""

    device: str
    port: int
    link_layer: str
    gid: bytes
    version: str
    lid: int
    mtu: int


class RdmaOffer(messages.Message):
    """The ports that reach the receiver, in the order in which they pair up; `n_pairs` queue pairs on each."""

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


_DECODER = msgspec.msgpack.Decoder(RdmaOffer | RdmaPairs | RdmaStep | PeerSlots)


def decode(data: bytes) -> messages.Message:
    """Return the message in *data*."""
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes on an rdma connection are no message: {exc}") from exc
