"""Cards work through messages at their rate, in turn, and lose no byte."""
from __future__ import annotations

import pytest

from bpsfast.simulator.clock import Clock
from bpsfast.simulator.network import Load, Network


def arrivals(rates: list[float], posts: list[tuple[int, int, float]],
             overhead_s: float = 0.0, latency_s: float = 0.0) -> tuple[list[float], Network]:
    """Post (sender, receiver, bytes) at time 0, in this order; return when each arrived."""
    clock = Clock()
    network = Network(clock, rates, overhead_s, latency_s)
    found = [0.0] * len(posts)
    for i, (sender, receiver, nbytes) in enumerate(posts):
        network.post(sender, receiver, Load(nbytes, nbytes), lambda i=i: found.__setitem__(i, clock.now))
    clock.run()
    return found, network


def test_one_message_costs_its_bytes_an_overhead_and_the_latency() -> None:
    assert arrivals([10.0, 10.0], [(0, 1, 50.0)], overhead_s=1.0, latency_s=0.5)[0] == [6.5]


def test_a_sender_works_through_its_messages_connections_in_turn() -> None:
    posts = [(0, 1, 10.0), (0, 1, 10.0), (0, 1, 10.0), (0, 2, 10.0)]
    assert arrivals([10.0] * 3, posts)[0] == [1.0, 2.0, 4.0, 3.0]


def test_a_receiver_takes_in_what_several_send_one_after_another() -> None:
    assert arrivals([10.0] * 3, [(0, 2, 10.0), (1, 2, 10.0)])[0] == [1.0, 2.0]


def test_both_directions_of_a_card_work_at_once() -> None:
    assert arrivals([10.0] * 2, [(0, 1, 10.0), (1, 0, 10.0)])[0] == [1.0, 1.0]


def test_a_slow_sender_does_not_hold_a_fast_receiver() -> None:
    found, network = arrivals([1.0, 10.0, 10.0], [(0, 2, 10.0), (1, 2, 10.0)])
    assert found == [10.0, 2.0]
    assert network.cards[2].rx_nbytes == 20.0 and network.cards[2].rx_busy_s == pytest.approx(2.0)


def test_no_card_is_busy_longer_than_its_bytes_need() -> None:
    posts = [(i % 3, (i + 1 + i // 3 % 2) % 3, 5.0 + i) for i in range(30)]
    found, network = arrivals([3.0, 4.0, 5.0], posts)
    assert sum(card.tx_nbytes for card in network.cards) == sum(nbytes for _, _, nbytes in posts)
    assert max(found) >= max(max(card.tx_nbytes, card.rx_nbytes) / card.rate for card in network.cards) - 1e-9
    assert max(found) <= sum((card.tx_nbytes + card.rx_nbytes) / card.rate for card in network.cards)
