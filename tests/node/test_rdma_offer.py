"""What two nodes tell each other about RDMA: what is read is what was said, and nothing else."""
from __future__ import annotations

import pytest

from bpsfast.node.transport.rdma import rdma_messages
from bpsfast.orchestration import messages
from bpsfast.orchestration.errors import ProtocolError

RAIL = rdma_messages.RailOffer(device="mlx5_0", port=1, link_layer="Ethernet", gid=bytes(range(16)), version="v2",
                               lid=0, mtu=4096)


@pytest.mark.parametrize("message", [
    rdma_messages.RdmaOffer(version=1, rails=(RAIL, RAIL), n_pairs=2),
    rdma_messages.RdmaOffer(version=1, objection="there is no RDMA device here"),
    rdma_messages.RdmaPairs(pairs=(rdma_messages.PairOffer(number=17, psn=(1 << 24) - 1),)),
    rdma_messages.RdmaStep(step="proven"),
    rdma_messages.PeerSlots(generation=3, slots=(
        rdma_messages.Slot(part=1, even=1 << 47, odd=4096, rkey=(1 << 32) - 1, nbytes=5),)),
    rdma_messages.RdmaProven(pairs=(0, 3)),
    rdma_messages.LinkTaken(),
    rdma_messages.LinkResumed(generation=3, awaited={1: 7, 1 << 19: (1 << 32) - 1}, slots=(
        rdma_messages.Slot(part=1, even=1 << 47, odd=4096, rkey=1, nbytes=5, framed=True),)),
    rdma_messages.LinkClosed(by_tcp=True),
], ids=lambda message: type(message).__name__)
def test_what_was_said_is_read(message):
    assert rdma_messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"hello", messages.encode(messages.Finish()), b"\x80"])
def test_anything_else_is_refused(data):
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes on an rdma connection are no message"):
        rdma_messages.decode(data)
