"""The native dispatch posts what the policy in Python would, in its order, whatever happens when."""
from __future__ import annotations

import ctypes
import errno

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.priority.send_queue import ArrivalOrder, NicQueue, SendKey, WriteOrder
from bpsfast.pyx.dispatch import Dispatch
from bpsfast.pyx.engine import EVENT_DELIVERED, EVENT_FORWARD, EVENT_RESULT

N_PEERS, N_PARTS = 6, 12
peer, part_number = st.integers(0, N_PEERS - 1), st.integers(0, N_PARTS - 1)
STEPS = st.one_of(
    st.tuples(st.just("forward"), peer, part_number, st.integers(0, 300)),
    st.tuples(st.just("result"), part_number, st.integers(0, 300)),
    st.tuples(st.just("deliver"), peer), st.tuples(st.just("deliver"), peer),
    st.tuples(st.sampled_from(["hold", "remove", "add"]), peer),
    st.tuples(st.just("resume"), peer, st.sets(part_number)),
    st.tuples(st.just("plan"), st.dictionaries(peer, st.integers(0, 1000))),
    st.tuples(st.just("commit"), st.permutations(range(N_PARTS)), st.dictionaries(part_number, st.sets(peer))),
    st.tuples(st.just("set_credit"), st.integers(0, 600)),
    st.tuples(st.just("forget"), part_number),
)
POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32,
                        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.POINTER(ctypes.c_int))


class Recorder:
    """A stream that notes what is posted to it: (its number, part, round, flags, nbytes); `rc` is what it answers.

    `backlog`: what it says that it has to deliver; None: nothing.
    """

    def __init__(self, number: int, posted: list[tuple[int, ...]], rc: int = 0,
                 backlog: int | None = None) -> None:
        self.handle = number
        self.backlog = ctypes.c_uint64(backlog or 0)
        self.backlog_address = 0 if backlog is None else ctypes.addressof(self.backlog)

        def post(number, part, round_, flags, _address, nbytes, _may_be_at_once, _is_delivered):
            posted.append((number or 0, part, round_, flags, nbytes))
            return rc

        self._function = POST(post)
        self.post_address = ctypes.cast(self._function, ctypes.c_void_p).value


class Policy:
    """The same in Python, by `NicQueue` and `WriteOrder`."""

    def __init__(self, credit: int, fifo: bool) -> None:
        self.queue: NicQueue[tuple[int, int, int, SendKey]] = NicQueue(credit)
        self.order = ArrivalOrder() if fifo else WriteOrder()
        self.posted: list[tuple[int, ...]] = []
        self.last: dict[int, dict[int, tuple[int, int, int, SendKey]]] = {}

    def put(self, whom: list[int], part: int, round_: int, nbytes: int, rank: int, is_result: bool) -> None:
        key = self.order.enter(part, rank, is_result, self.queue.first_order)
        for each in whom:
            self.queue.put(each, (part, round_, nbytes, key), order=key.order, key=key.key, nbytes=nbytes)

    def repeat(self, who: int, part: int, round_: int) -> None:
        write = self.last[who].get(part)
        if write is not None and write[1] == round_:
            del self.last[who][part]
            self.queue.put(who, write, order=write[3].order, key=write[3].key, nbytes=write[2])

    def pump(self) -> None:
        while (found := self.queue.pop()) is not None:
            who, write = found
            self.last[who][write[0]] = write
            self.posted.append((who, write[0], write[1], 0, write[2]))


class Both:
    """The native dispatch and the policy, which get the same."""

    def __init__(self, credit: int, fifo: bool) -> None:
        self.policy, self.native, self.posted = Policy(credit, fifo), Dispatch(credit, fifo=fifo), []
        self.places = {each: (7 * each + 3) % N_PEERS for each in range(N_PEERS)}
        self.there: set[int] = set()
        self.held: set[int] = set()
        self.in_flight: dict[int, list[int]] = {}
        self.rounds, self.readers = [0] * N_PARTS, {}
        self.commit(range(N_PARTS), {part: range(N_PEERS) for part in range(N_PARTS)})
        for each in range(N_PEERS - 1):
            self.add(each)

    def commit(self, ranks, readers) -> None:
        self.ranks = list(ranks)
        news = {part: tuple(found) for part, found in readers.items()}
        self.readers |= news
        self.native.commit(self.ranks, {part: part for part in range(N_PARTS)}, news)

    def add(self, who: int) -> None:
        if who not in self.there:
            self.there.add(who)
            self.policy.queue.add(who, self.places[who])
            self.policy.last[who] = {}
            self.native.add(who, self.places[who])
            self.native.route(who, [Recorder(who, self.posted)], n_nodes=1)
            self.in_flight[who] = []

    def _put(self, kind: int, source: int, whom: list[int], part: int, nbytes: int) -> None:
        self.rounds[part] += 1
        self.native.report([(kind, source, part, self.rounds[part], 0, 0, nbytes)])
        if whom or kind == EVENT_RESULT:
            self.policy.put(whom, part, self.rounds[part], nbytes, self.ranks[part], kind == EVENT_RESULT)

    def forward(self, who: int, part: int, nbytes: int) -> None:
        self._put(EVENT_FORWARD, who, [who] if who in self.there else [], part, nbytes)

    def result(self, part: int, nbytes: int) -> None:
        self._put(EVENT_RESULT, 0, [each for each in self.readers.get(part, ()) if each in self.there], part, nbytes)

    def deliver(self, who: int) -> None:
        if self.in_flight.get(who):
            nbytes = self.in_flight[who].pop(0)
            self.policy.queue.release(who, nbytes)
            self.native.report([(EVENT_DELIVERED, who, 0, 0, 0, 0, nbytes)])

    def hold(self, who: int) -> None:
        assert self.native.hold(who) == (who in self.there - self.held)
        if who in self.there:
            self.policy.queue.hold(who)
            self.held.add(who)

    def resume(self, who: int, parts: set[int]) -> None:
        awaited = {part: self.rounds[part] for part in parts}
        assert self.native.resume(who, awaited) == (who in self.there)
        if who in self.there:
            self.policy.queue.resume(who)
            self.in_flight[who] = []
            for part, round_ in awaited.items():
                self.policy.repeat(who, part, round_)
            self.held.discard(who)

    def remove(self, who: int) -> None:
        self.native.remove(who)
        if who in self.there:
            self.policy.queue.remove(who)
            del self.policy.last[who], self.in_flight[who]
            self.there.remove(who)
            self.held.discard(who)

    def plan(self, shares: dict[int, int]) -> None:
        shares = {each: nbytes for each, nbytes in shares.items() if each in self.there}
        self.policy.queue.plan(shares)
        self.native.plan(shares)

    def set_credit(self, nbytes: int) -> None:
        self.policy.queue.set_credit(nbytes)
        self.native.set_credit(nbytes)

    def forget(self, part: int) -> None:
        self.policy.order.forget(part)
        for posted in self.policy.last.values():
            posted.pop(part, None)
        self.native.forget([part])

    def check(self) -> None:
        n = len(self.policy.posted)
        self.policy.pump()
        assert self.posted == self.policy.posted and self.native.failure is None
        for who, *_, nbytes in self.posted[n:]:
            self.in_flight[who].append(nbytes)
        counters, queue = self.native.counters(), self.policy.queue
        assert (counters["queued"], counters["in_flight_nbytes"], counters["peak_in_flight_nbytes"]) == (
            queue.queued, queue.in_flight_nbytes, queue.peak_nbytes)
        assert {who: self.native.posted(who) for who in self.there} == {
            who: set(last) for who, last in self.policy.last.items()}


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=100), st.integers(0, 600), st.booleans())
def test_what_is_posted_is_what_the_policy_says(steps, credit, fifo):
    both = Both(credit, fifo)
    for name, *arguments in steps:
        getattr(both, name)(*arguments)
        both.check()
    while any(both.in_flight.values()):  # to the end
        for each in range(N_PEERS):
            both.deliver(each)
            both.check()


def test_parts_take_turns_on_streams_by_node_and_number():
    posted: list[tuple[int, ...]] = []
    dispatch = Dispatch(1 << 20)
    dispatch.add(0, 0)
    streams = [Recorder(number, posted) for number in range(3)]
    parts = range(12)

    def numbers(**turns):
        dispatch.route(0, streams, n_nodes=2, **turns)
        posted.clear()
        for part in parts:
            dispatch.report([(EVENT_FORWARD, 0, part, 1, 0, 0, 1)])
        return [number for number, *_ in posted]

    dispatch.commit([0], dict.fromkeys(parts, 0), {})
    assert numbers() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]
    assert numbers(n_turns=2) == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert numbers(n_turns=2, counts={4: 1, 5: 3, 6: 9}) == [0, 0, 1, 1, 0, 2, 0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(("backlogs", "n_turns", "expected"), [
    ((0, 0, 0), 0, [0, 1, 2, 0, 1, 2]), ((5, 5, 5), 0, [0, 1, 2, 0, 1, 2]), ((9, 1, 0), 0, [2, 2, 2, 2, 2, 2]),
    ((9, 1, 0), 2, [1, 1, 1, 1, 1, 1]), ((0, 7, 0), 0, [0, 0, 2, 0, 0, 2]), ((1, (1 << 63) + 1, 1 << 63), 0, [0] * 6),
])
def test_a_write_goes_to_the_stream_that_has_the_least_to_deliver(backlogs, n_turns, expected):
    posted = []
    streams = [Recorder(number, posted, backlog=backlog) for number, backlog in enumerate(backlogs)]
    dispatch = Dispatch(1 << 20)
    dispatch.add(0, 0)
    dispatch.commit(list(range(6)), {part: part for part in range(6)}, {})
    dispatch.route(0, streams, n_nodes=1, n_turns=n_turns)
    dispatch.report([(EVENT_FORWARD, 0, part, 1, 0, 0x1000, 10) for part in range(6)])
    assert [number for number, *_ in posted] == expected


def refused(code: int, first_parts: dict[int, int] | None = None) -> Dispatch:
    posted: list[tuple[int, ...]] = []
    dispatch = Dispatch(100)
    dispatch.commit([0, 1], first_parts or {0: 0, 1: 1}, {1: (0,)})
    dispatch.add(0, 0)
    dispatch.route(0, [Recorder(0, posted, code)], n_nodes=1)
    return dispatch


@pytest.mark.parametrize("code", [errno.ESHUTDOWN, errno.ENOMEM])
def test_after_a_refused_write_nothing_is_posted(code):
    dispatch = refused(code)
    dispatch.report([(EVENT_FORWARD, 0, part, 1, 0, 0x1000, 10) for part in (1, 0)])
    assert dispatch.failure == (code, 0, 0, 1, 10, 0x1000), "the more urgent one"
    assert dispatch.counters()["queued"] == 1


def test_what_no_commit_knows_what_has_no_stream_and_what_was_not_sent_are_failures():
    for kind, part in ((EVENT_FORWARD, 0), (EVENT_FORWARD, 3), (EVENT_FORWARD, 70_000), (EVENT_RESULT, 3)):
        dispatch = refused(0, {1: 0, 3: 2})  # 3: the order says nothing of its unit
        dispatch.report([(kind, 0, part, 1, 0, 0, 10)])
        assert dispatch.failure[:3] == (errno.ENOENT, 0xffffffff, part)
    dispatch = refused(0)
    dispatch.report([(EVENT_RESULT, 0, 0, 1, 0, 0, 10)])
    assert dispatch.failure[:3] == (errno.ENOENT, 0xffffffff, 0), "nobody has told who gets it"
    dispatch = refused(0)
    dispatch.add(3, 0)
    dispatch.report([(EVENT_FORWARD, 3, 1, 1, 0, 0, 10)])
    assert dispatch.failure[:3] == (errno.ENOTCONN, 3, 1)
    dispatch = refused(0)
    dispatch.report([(EVENT_FORWARD, 0, 1, 1, 0, 0, 10), (EVENT_DELIVERED, 0, 1, 1, 0, 0, 11)])
    assert dispatch.failure[:3] == (errno.EPROTO, 0, 1)


def test_an_abandoned_dispatch_posts_nothing():
    dispatch = refused(errno.EIO)
    dispatch.abandon()
    dispatch.report([(EVENT_FORWARD, 0, 1, 1, 0, 0, 10)])
    assert dispatch.failure is None and dispatch.counters()["queued"] == 1
