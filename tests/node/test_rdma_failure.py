"""What a stream's failure is called: operation, partition, peer, port, status in words, what it usually means."""
from __future__ import annotations

import pytest

from bpsfast.node.transport.rdma.failures import PortNow, describe, is_consequence

S = 1_000_000_000
#: A stream that was proven at 100 s and failed at 200 s.
BAD = {"kind": "completion", "code": 12, "vendor_error": 129, "slot": 7, "round": 3, "nbytes": 4096,
       "is_receive": False, "proven_ns": 100 * S, "at_ns": 200 * S}


def said(failure, port: PortNow | None = None) -> str:
    return describe(failure, "node 2", "mlx5_0/1", port or PortNow())


@pytest.mark.parametrize(("failure", "words"), [
    (BAD, ["RDMA WRITE of partition 7 (round 3, 4096 bytes) to node 2 over mlx5_0/1 failed: IBV_WC_RETRY_EXC_ERR",
           "12, vendor error 129", "usually", "bpsfast doctor"]),
    (BAD | {"slot": None, "is_receive": True, "code": 5},
     ["a receive request for its writes to node 2 over mlx5_0/1 failed: IBV_WC_WR_FLUSH_ERR"]),
    (BAD | {"kind": "arrival", "code": 5},
     ["a write of 4096 bytes for slot 7, round 3 mod 16, epoch 5 mod 256 came from node 2 over mlx5_0/1"]),
    (BAD | {"kind": "post", "code": 22}, ["ibv_post_send of an RDMA WRITE of partition 7", "EINVAL"]),
    (BAD | {"kind": "post", "code": 12, "is_receive": True}, ["ibv_post_recv to node 2", "ENOMEM"]),
    (BAD | {"kind": "event", "code": 8}, ["the device is gone (DEVICE_FATAL)", "on mlx5_0/1"]),
    (BAD | {"kind": "event", "code": 77}, ["event 77 of the device"]),
    (BAD | {"kind": "poll", "code": 5}, ["the completions of mlx5_0/1 can no longer be read"]),
    (BAD | {"kind": "silence", "code": 30},
     ["RDMA WRITE of partition 7 (round 3, 4096 bytes) to node 2 over mlx5_0/1 had no answer for 30 s", "dmesg"]),
    (None, ["closed"]),
])
def test_words(failure, words):
    for word in words:
        assert word in said(failure)


@pytest.mark.parametrize(("at_s", "proven_s", "explains"), [
    (199, 100, True),
    (201, 100, True),  # noticed while the failure was looked into
    (190, 100, True),
    (150, 100, False),  # long before the write was posted that failed
    (99, 100, False), (195, 196, False),  # the stream was proven after it
    (190, 0, True),  # the stream was never proven
])
def test_a_port_that_went_down_is_named_only_where_it_explains_the_failure(at_s, proven_s, explains):
    words = said(BAD | {"proven_ns": proven_s * S}, PortNow(error_ns=at_s * S))
    assert words.endswith("; this machine's port went down before that (PORT_ERR)") is explains, words


def test_a_port_that_went_down_before_a_long_silence_explains_it():
    silence = BAD | {"kind": "silence", "code": 31}
    assert "PORT_ERR" in said(silence, PortNow(error_ns=168 * S)) and "PORT_ERR" not in said(silence)


@pytest.mark.parametrize(("port", "words"), [
    (PortNow("DOWN"), "; this machine's port is DOWN now"),
    (PortNow("DOWN", error_ns=50 * S), "; this machine's port is DOWN now"),
    (PortNow("gone with its device"), "; this machine's port is gone with its device now"),
    (PortNow(has_lid=False), "; this machine's port has another LID now"),
    (PortNow(has_gid=False), "; the GID is gone from this machine's port: an address or an interface went"),
])
def test_what_the_port_is_now_explains_what_no_event_told(port, words):
    assert said(BAD, port).endswith(words)


def test_a_sound_port_is_not_mentioned():
    assert "this machine's port" not in said(BAD)


def test_a_flush_is_a_consequence_and_nothing_else_is():
    assert is_consequence(BAD | {"code": 5})
    for cause in ({}, {"kind": "post", "code": 5}, {"kind": "event", "code": 3}, {"kind": "poll", "code": 5},
                  {"kind": "arrival", "code": 5}):
        assert not is_consequence(BAD | cause)
