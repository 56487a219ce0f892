"""The measurement of a node's sums: a plausible rate in the time allowed, and words where it cannot be."""
from __future__ import annotations

import socket
import threading
import time

import pytest

from bpsfast import kernels
from bpsfast.node import capacity
from bpsfast.orchestration.errors import ConfigError


def test_a_rate_is_found_quickly():
    kernels.warm(["float32"])
    begin = time.monotonic()
    rate = capacity.measure_sum_rate(2, 0.1)
    assert time.monotonic() - begin < 3.0
    # slower than this no CPU that runs Python is, faster than this no memory
    assert 10e6 < rate < 200e9
    by_card = capacity.measure_sum_rate(1, 0.1, by_tcp=False)
    assert by_card > 1.5 * capacity.measure_sum_rate(1, 0.1), "a card receives and sends"
    assert not [thread for thread in threading.enumerate() if thread.name == "bpsfast-measure"]


def test_without_loopback_it_says_what_to_set(monkeypatch):
    def broken(*_, **__):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_server", broken)
    with pytest.raises(ConfigError, match=r"could not be measured \(.*unreachable\); set BPSFAST_SUM_RATE"):
        capacity.measure_sum_rate(1)
