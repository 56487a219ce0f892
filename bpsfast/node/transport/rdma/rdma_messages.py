"""What two nodes tell each other before and while they use RDMA; over their own connection, never in steady state.

    both   RdmaOffer       the ports to use, or why there are none
    both   RdmaPairs       numbers of the queue pairs, in the order of the lanes
    both   RdmaStep        "connected", then "proven": a step is done, or why it is not
    both   PeerSlots       once per generation: where the other writes

Those before `PeerSlots` may carry an objection, which ends the attempt on both sides with the same words.
"""
from __future__ import annotations

import msgspec

from ....orchestration import messages
from ....orchestration.errors import DECODE_ERRORS, ProtocolError

#: Bumped whenever a field changes its meaning.
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
    """The ports that lead to you, in the order in which they pair up; `n_pairs` queue pairs on each."""

    version: int
    rails: tuple[RailOffer, ...] = ()
    n_pairs: int = 1
    objection: str = ""


class PairOffer(messages.Record):
    """One queue pair: number and first packet sequence number."""

    number: int
    psn: int


class RdmaPairs(messages.Message):
    """One entry per lane."""

    pairs: tuple[PairOffer, ...] = ()
    objection: str = ""


class RdmaStep(messages.Message):
    """`step` is done on this side, unless there is an objection."""

    step: str
    objection: str = ""


class Slot(messages.Record):
    """Where you write `part`: addresses for even and odd rounds, the key of that memory on the lane's device, bytes.

    `framed`: up to so many.
    """

    part: int
    even: int
    odd: int
    rkey: int
    nbytes: int
    framed: bool = False


class PeerSlots(messages.Message):
    """All parts of `generation` that you write to me: partials of those I own, results of those you own."""

    generation: int
    slots: tuple[Slot, ...]


_DECODER = msgspec.msgpack.Decoder(RdmaOffer | RdmaPairs | RdmaStep | PeerSlots)


def decode(data: bytes) -> messages.Message:
    """Return the message in *data*."""
    try:
        return _DECODER.decode(data)
    except DECODE_ERRORS as exc:
        raise ProtocolError(f"{len(data)} bytes on an rdma connection are no message: {exc}") from exc
