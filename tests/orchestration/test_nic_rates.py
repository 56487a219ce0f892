"""NIC rates as they become known: said at once, measured, of who comes late or is lost, and after another scheduler."""
from __future__ import annotations

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.job.admission import NicRates


def node(index, rate=0.0, probes=False):
    return m.NodeInfo(index=index, host="h", pid=1, ranks=(), address="h:1", shm_name="", nic_rate_bytes=rate,
                      nic_limit_bytes=0.0, sum_rate_bytes=0.0, copy_rate_bytes=0.0, probes=probes)


def table():
    return NicRates([node(0, 5.0), node(1, probes=True), node(2, probes=True)])


def test_who_measures_is_waited_for_once():
    found = table()
    assert (found.rates, found.waiting) == ([5.0, 0.0, 0.0], {1, 2})
    assert found.measured(1, 7.0) and not found.measured(1, 8.0), "a second time"
    assert not found.measured(0, 9.0), "it has said its rate"
    assert (found.message, found.waiting) == (m.Rates(nic_rate_bytes=(5.0, 7.0, 0.0)), {2})


def test_who_is_lost_is_waited_for_no_more():
    found = table()
    waiting = found.waiting  # others look at it
    assert found.give_up(2) and not found.give_up(2) and not found.give_up(0)
    assert waiting == {1} and waiting is found.waiting


def test_nodes_with_what_is_known_of_them():
    found = table()
    found.measured(2, 3.0)
    found.add(4.0)
    nodes = [node(index) for index in range(4)]
    assert [each.nic_rate_bytes for each in found.known(nodes)] == [5.0, 0.0, 3.0, 4.0]


def test_another_scheduler_goes_on_with_what_the_one_before_knew():
    found = table()
    waiting = found.waiting
    found.resume((5.0, 6.0), {1, 9})
    assert found.rates == [5.0, 6.0, 0.0] and found.waiting == {1} and waiting is found.waiting
