"""Which receive gets which message, against the rules of MPI written down naively."""
from __future__ import annotations

from functools import partial

from hypothesis import given, settings, strategies as st

from bpsfast.collectives.p2p.receiver import Matching

CHANNELS, SOURCES, TAGS = st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)
STEPS = st.lists(st.one_of(
    st.tuples(st.just("message"), CHANNELS, SOURCES, TAGS),
    st.tuples(st.just("receive"), CHANNELS, st.none() | SOURCES, st.none() | TAGS),
    st.tuples(st.just("withdraw"), st.integers(0, 30), st.none(), st.none()),
    st.tuples(st.just("lose"), SOURCES, st.none(), st.none()),
), max_size=60)


def fits(receive, message):
    return receive[0] == message[0] and receive[1] in (None, message[1]) and receive[2] in (None, message[2])


class Naive:
    """All receives and all messages in the order in which they came; the first that fits."""

    def __init__(self):
        self.receives, self.messages = [], []

    def meet(self, mine, others, name, envelope, fit):
        for other in others:
            if fit(other[1]):
                others.remove(other)
                return other[0]
        mine.append((name, envelope))
        return None


class Name:
    """Something with an identity: `Matching` must not look inside."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        raise AssertionError("compared")

    __hash__ = None


def is_from(rank, source, each):
    return source == rank


def is_odd_from(rank, source, each):
    return source == rank and each.number % 2


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_the_first_that_fits(steps):
    naive, matching, names = Naive(), Matching(), []
    for step, *envelope in steps:
        name = Name(len(names))
        names.append(name)
        if step == "message":
            expected = naive.meet(naive.messages, naive.receives, name.number, envelope,
                                  partial(lambda message, each: fits(each, message), envelope))
            found = matching.arrive(*envelope, name)
        elif step == "receive":
            expected = naive.meet(naive.receives, naive.messages, name.number, envelope,
                                  partial(fits, envelope))
            found = matching.receive(*envelope, name)
        elif step == "withdraw":
            number = min(envelope[0], len(names) - 1)
            waits = [each for each in naive.receives if each[0] == number]
            assert matching.withdraw(names[number]) == bool(waits)
            naive.receives = [each for each in naive.receives if each[0] != number]
            continue
        else:
            lost = [each[0] for each in naive.receives if each[1][1] == envelope[0]]
            gone = [each[0] for each in naive.messages if each[1][1] == envelope[0] and each[0] % 2]
            assert [each.number for each in matching.take_receives(partial(is_from, envelope[0]))] == lost
            assert [each.number for each in matching.take_arrivals(partial(is_odd_from, envelope[0]))] == gone
            naive.receives = [each for each in naive.receives if each[0] not in lost]
            naive.messages = [each for each in naive.messages if each[0] not in gone]
            continue
        assert (found.number if found else None) == expected


@given(st.lists(st.tuples(SOURCES, TAGS), max_size=20), st.none() | SOURCES, st.none() | TAGS)
def test_messages_do_not_overtake_each_other(messages, source, tag):
    matching = Matching()
    for number, (sender, mark) in enumerate(messages):
        assert matching.arrive(0, sender, mark, number) is None
    taken = [matching.receive(0, source, tag, "receive") for _ in messages]
    fitting = [number for number, (sender, mark) in enumerate(messages)
               if source in (None, sender) and tag in (None, mark)]
    assert [number for number in taken if number is not None] == fitting


def test_what_lies_there_is_described():
    matching = Matching()
    assert matching.describe(3) == ""
    for number in range(3):
        matching.arrive(3, 1, 7, number)
    matching.arrive(3, 0, -2, "x")
    matching.arrive(4, 0, 0, "x")
    assert matching.describe(3) == "rank 0 tag -2, rank 1 tag 7 (3 messages)"
    for tag in range(20):
        matching.arrive(5, 0, tag, "x")
    assert matching.describe(5).endswith("rank 0 tag 7, ...")
