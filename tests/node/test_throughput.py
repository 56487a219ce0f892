"""The measurement of a node's sums: a plausible rate in the time allowed, and words where it cannot be."""
from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from bpsfast import kernels
from bpsfast.node import capacity
from bpsfast.orchestration.errors import ConfigError


@pytest.mark.parametrize("by_tcp", [True, False])
def test_a_plausible_rate_is_found(by_tcp):
    rate = capacity.measure_sum_rate(2, 0.1, by_tcp)
    # slower than this no CPU that runs Python is, faster than this no memory
    assert 10e6 < rate < 200e9
    assert not [thread for thread in threading.enumerate() if thread.name == "bpsfast-measure"]


def test_a_card_sends_and_receives_what_tcp_costs_a_thread(monkeypatch):
    kernels.warm(["float32"])
    passed = []
    connect = socket.create_connection

    class Counting(socket.socket):
        def send(self, data, *flags):
            passed.append(len(data))
            return super().send(data, *flags)

        def sendall(self, data, *flags):
            passed.append(len(data))
            return super().sendall(data, *flags)

    def connected(*arguments, **options):
        return Counting(fileno=connect(*arguments, **options).detach())

    monkeypatch.setattr(capacity.socket, "create_connection", connected)
    for by_tcp in (True, False):
        passed.clear()
        with contextlib.closing(capacity._Loop(by_tcp)) as loop:
            summed = loop.turn()
        assert sum(passed) == (summed if by_tcp else 0) and summed > 0


def test_without_loopback_it_says_what_to_set(monkeypatch):
    def broken(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_server", broken)
    with pytest.raises(ConfigError, match=r"could not be measured \(.*unreachable\); set BPSFAST_SUM_RATE"):
        capacity.measure_sum_rate(1)
