"""What a lane's failure is called: operation, partition, peer, port, status in words, what it usually means."""
from __future__ import annotations

import pytest

from bpsfast.transport.rdma.failure import describe

BAD = {"kind": "completion", "code": 12, "vendor_error": 129, "slot": 7, "round": 3, "nbytes": 4096,
       "is_receive": False}


@pytest.mark.parametrize(("failure", "event", "words"), [
    (BAD, -1, ["RDMA WRITE of partition 7 (round 3, 4096 bytes) to node 2 over mlx5_0/1 failed: IBV_WC_RETRY_EXC_ERR",
               "12, vendor error 129", "usually", "bpsfast doctor"]),
    (BAD, 10, ["this machine's port went down before that"]),
    (BAD | {"slot": None, "is_receive": True, "code": 5}, -1,
     ["a receive request for its writes to node 2 over mlx5_0/1 failed: IBV_WC_WR_FLUSH_ERR"]),
    (BAD | {"kind": "arrival", "code": 5}, -1,
     ["a write of 4096 bytes for slot 7, round 3 mod 16, epoch 5 mod 256 came from node 2 over mlx5_0/1"]),
    (BAD | {"kind": "post", "code": 22}, -1, ["ibv_post_send of an RDMA WRITE of partition 7", "EINVAL"]),
    (BAD | {"kind": "post", "code": 12, "is_receive": True}, -1, ["ibv_post_recv to node 2", "ENOMEM"]),
    (BAD | {"kind": "event", "code": 8}, -1, ["the device is gone (DEVICE_FATAL)", "on mlx5_0/1"]),
    (BAD | {"kind": "event", "code": 77}, -1, ["event 77 of the device"]),
    (BAD | {"kind": "poll", "code": 5}, -1, ["the completions of mlx5_0/1 can no longer be read"]),
    (None, -1, ["closed"]),
])
def test_words(failure, event, words):
    said = describe(failure, "node 2", "mlx5_0/1", event)
    for word in words:
        assert word in said


def test_a_port_event_is_told_only_where_it_explains_something():
    assert "went down" not in describe(BAD, "node 2", "mlx5_0/1", 9)


def test_the_state_of_the_port_explains_what_no_event_told_yet():
    assert describe(BAD, "node 2", "mlx5_0/1", -1, "DOWN").endswith("; this machine's port is DOWN now")
    assert "DOWN" not in describe(BAD, "node 2", "mlx5_0/1", 10, "DOWN")
