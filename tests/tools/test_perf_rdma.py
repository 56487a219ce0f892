"""How perf connects its queue pairs, without a device: as the transport does."""
from __future__ import annotations

from typing import Any

import pytest

from bpsfast.hardware.rdma_devices import Gid
from bpsfast.hardware.rdma_route import Rail
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.tools.perf import perf_plan as plans
from bpsfast.tools.perf.rdma import RdmaEnd


class Pair:
    """Takes down what is asked of a queue pair."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def to_init(self, port: int, **how: Any) -> None:
        self.asked["to_init"] = how

    def to_rtr(self, number: int, psn: int, **how: Any) -> None:
        self.asked["to_rtr"] = how

    def to_rts(self, **how: Any) -> None:
        self.asked["to_rts"] = how


#: Of the same subnet as ours.
PEER = b"\1" * 8 + b"\2" * 8


@pytest.mark.parametrize(("link_layer", "address"), [
    ("Ethernet", {"lid": 0, "gid": PEER, "gid_index": 3}),
    ("InfiniBand", {"lid": 7}),  # no global route header, which costs 40 bytes of each packet and may lead elsewhere
])
def test_a_path_is_addressed_as_the_transport_does(link_layer, address):
    end = RdmaEnd.__new__(RdmaEnd)
    end.plan, end.pairs, end._max_reads = plans.make("bw", {"transport": "rdma"}), [Pair()], 4
    end.rail = Rail("mlx5_0", 1, Gid("mlx5_0", 1, 3, b"\1" * 16, "v2", None), None, "", pkey=0x8001, pkey_index=2)
    end.port = {"link_layer": link_layer, "active_mtu": 4096}
    peer = {"link_layer": link_layer, "mtu": 2048, "lid": address["lid"], "gid": PEER, "pkey": 0x0001, "reads": 4,
            "numbers": [5], "psns": [6]}
    end.connect(peer)
    assert end.pairs[0].asked["to_init"]["pkey_index"] == 2
    asked = end.pairs[0].asked["to_rtr"]
    assert {name: asked[name] for name in ("lid", "gid", "gid_index") if name in asked} == address
    assert asked["mtu"] == 2048
    with pytest.raises(UnsupportedError, match="mlx5_0/1 has the partition key 0x8001, the peer's port 0x8002"):
        end.connect(peer | {"pkey": 0x8002})
