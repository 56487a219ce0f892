"""What a node says of itself: what was set counts, what was not is looked up or measured."""
from __future__ import annotations

from bpsfast.base.settings import Settings
from bpsfast.node import capacity


def test_what_is_set_counts():
    found = capacity.of(Settings(nic_rate=10.0, nic_limit=2.0, sum_rate=4.0, cores=1), "127.0.0.1")
    assert found[:4] == (1.25e9, 0.25e9, 0.5e9, False)
    assert 50e6 < found.copy_rate_bytes < 1e12


def test_loopback_tells_nothing_and_a_whole_machine_is_not_measured():
    assert capacity.of(Settings(), "127.0.0.1")[:4] == (0.0, 0.0, 0.0, False)


def test_few_cpus_are_measured():
    found = capacity.of(Settings(cores=1), "127.0.0.1")
    assert found.nic_rate_bytes == 0.0 and 10e6 < found.sum_rate_bytes < 200e9
