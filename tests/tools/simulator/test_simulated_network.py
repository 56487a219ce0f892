"""Cards work through messages at their rate, in turn, and lose no byte."""
from __future__ import annotations

import pytest

from bpsfast.tools.simulator.network import FREE, Clock, Costs, Load, Network


def arrivals(rates: list[float], posts: list[tuple[int, int, float]], costs: Costs = FREE
             ) -> tuple[list[float], Network]:
    """Post (sender, receiver, bytes) at time 0, in this order; return when each arrived."""
    clock = Clock()
    network = Network(clock, rates, costs)
    found = [0.0] * len(posts)
    for i, (sender, receiver, nbytes) in enumerate(posts):
        network.post(sender, receiver, Load(nbytes, nbytes), lambda i=i: found.__setitem__(i, clock.now))
    clock.run()
    return found, network


def test_one_message_costs_its_bytes_an_overhead_and_the_latency() -> None:
    assert arrivals([10.0, 10.0], [(0, 1, 50.0)], Costs(overhead_s=1.0, latency_s=0.5))[0] == [6.5]


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
    assert network.cards[2].rx.nbytes == 20.0


def test_no_card_is_busy_longer_than_its_bytes_need() -> None:
    posts = [(i % 3, (i + 1 + i // 3 % 2) % 3, 5.0 + i) for i in range(30)]
    rates = [3.0, 4.0, 5.0]
    found, network = arrivals(rates, posts)
    assert sum(card.tx.nbytes for card in network.cards) == sum(nbytes for _, _, nbytes in posts)
    times_s = [(card.tx.nbytes / rate, card.rx.nbytes / rate) for card, rate in zip(network.cards, rates)]
    assert max(map(max, times_s)) - 1e-9 <= max(found) <= sum(map(sum, times_s))


def test_a_shaped_direction_that_was_idle_makes_up_for_a_burst() -> None:
    clock = Clock()
    network = Network(clock, [10.0] * 2, Costs(burst_nbytes=15.0))
    found: list[float] = []
    for at_s in (4.0, 4.0, 4.0, 7.0):
        clock.at(at_s, lambda: network.post(0, 1, Load(10.0, 10.0), lambda: found.append(clock.now)))
    clock.run()
    assert found == [4.0, 4.5, 5.5, 7.0], "15 bytes at once, then 10 a second; idle again, 10 at once"


@pytest.mark.parametrize("queued, heard_s", [(False, 1.5), (True, 3.5)])
def test_an_answer_waits_behind_the_bytes_of_the_other_direction_where_links_do_that(queued, heard_s) -> None:
    clock = Clock()
    network = Network(clock, [10.0] * 3, Costs(latency_s=0.5, queued_answers=queued))
    heard: list[float] = []
    for _ in range(2):
        network.post(1, 2, Load(10.0, 10.0), lambda: None)  # two seconds of what leaves the card that answers
    for _ in range(3):
        network.post(2, 0, Load(10.0, 10.0), lambda: None)  # three and the latency, of what comes where it is heard
    clock.at(1.0, lambda: network.answer(1, 0, lambda: heard.append(clock.now)))
    clock.run()
    assert heard == [heard_s]
