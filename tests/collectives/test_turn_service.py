"""Operations begun in one order on several ranks: real sockets, a thread a rank, operations that need all ranks."""
from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from bpsfast.collectives.turn_service import TurnService
from bpsfast.orchestration.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    MismatchError,
    PeerLostError,
    StallError,
    UnsupportedError,
)
from bpsfast.orchestration.priority.turns import Entry
from bpsfast.orchestration.security import curve_pair

LIMIT_S = 30.0


class Group:
    """*size* ranks; an operation ends on all ranks when the last has begun it, as an all-reduce does."""

    def __init__(self, size, credit_nbytes=1, timeout_s=LIMIT_S, absent=(), together=False, secret=b""):
        self.size = size
        self.begun = [[] for _ in range(size)]
        self._lock = threading.Lock()
        self._waiting = {}
        boxes = [SimpleQueue() for _ in range(size)]

        def agree(rank, said):
            if rank == 0:
                self.said = said
                for box in boxes:
                    box.put(said)
            return boxes[rank].get(timeout=LIMIT_S)

        self.services = []

        def join(rank):
            self.services.append(TurnService(
                rank, size, lambda said: agree(rank, said), host=lambda: "127.0.0.1", credit_nbytes=credit_nbytes,
                timeout_s=timeout_s, together=together, secret=secret))

        self.join = join
        for rank in range(size):
            if rank not in absent:
                join(rank)

    def give(self, rank, name, priority=0, nbytes=1, fails=False, waits_for=None):
        """Give *rank* an operation; returns a future of its end. *waits_for*: an event that its beginning awaits."""
        future = Future()

        def begin(finish):
            if fails:
                raise OSError("no such device")
            if waits_for is not None:
                waits_for.wait(LIMIT_S)
            with self._lock:
                self.begun[rank].append(name)
                waiting = self._waiting.setdefault(name, [])
                waiting.append(finish)
                complete = waiting if len(waiting) == self.size else []
                if complete:
                    del self._waiting[name]
            for each in complete:
                each(None)

        def done(error):
            if error is None:
                future.set_result(name)
            else:
                future.set_exception(error)

        self.services[rank].submit(Entry(name=name, part=0, nbytes=nbytes, kind="test"), begin, done, priority)
        return future

    def close(self):
        """Close all ranks; returns what they raise."""
        with ThreadPoolExecutor(self.size) as pool:
            return [each.exception(LIMIT_S) for each in [pool.submit(service.close) for service in self.services]]


@pytest.fixture
def group():
    """group(size, ...) -> Group, closed at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(Group(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_begin_in_rank_0s_order_of_urgency(group, size):
    ranks = group(size)
    names = [f"t{i}" for i in range(20)]
    futures = []
    for rank in range(size):
        for name in random.Random(rank).sample(names, 20) if rank else names:
            futures.append(ranks.give(rank, name, priority=int(name[1:])))
    assert sorted(future.result(LIMIT_S) for future in futures) == sorted(names * size)
    assert all(order == ranks.begun[0] for order in ranks.begun) and sorted(ranks.begun[0]) == sorted(names)
    # t0 had begun when the others came: credit was for one
    assert size == 1 or ranks.begun[0][2:] == sorted(ranks.begun[0][2:], key=lambda name: -int(name[1:]))
    assert ranks.close() == [None] * size


def test_a_name_can_come_again_when_its_future_is_done_and_not_before(group):
    ranks = group(2)
    for _ in range(50):
        first = ranks.give(0, "a")
        with pytest.raises(BusyError, match="given twice"):
            ranks.give(0, "a")
        second = ranks.give(1, "a")
        assert first.result(LIMIT_S) == second.result(LIMIT_S) == "a"


def test_closing_waits_for_what_was_given(group):
    ranks = group(2)
    futures = [ranks.give(rank, f"t{i}") for rank in (0, 1) for i in range(5)]
    assert ranks.close() == [None, None]
    assert all(future.done() for future in futures)
    with pytest.raises(ClosedError, match="after close"):
        ranks.give(0, "late")


def test_who_has_not_given_something_is_named_on_every_rank(group):
    ranks = group(3, timeout_s=0.5)
    given = [ranks.give(0, "a"), ranks.give(1, "a")]
    for future in given:
        with pytest.raises(StallError, match=r"on rank 2 .*'a' part 0 .* has not been given here"):
            future.result(LIMIT_S)
    with pytest.raises(StallError):
        ranks.give(2, "a")


def test_what_rank_0_has_not_given_is_named(group):
    ranks = group(2, timeout_s=0.5)
    with pytest.raises(StallError, match="rank 0 has not given 'b' part 0"):
        ranks.give(1, "b").result(LIMIT_S)


def test_a_rank_that_never_comes_is_named_by_all_others(group):
    ranks = group(3, timeout_s=0.5, absent=(2,))
    for future in [ranks.give(0, "a"), ranks.give(1, "a")]:
        with pytest.raises(StallError, match=r"ranks \[2\] have not connected"):
            future.result(LIMIT_S)


def test_where_nothing_is_to_be_done_no_time_is_too_long(group):
    ranks = group(2, timeout_s=0.1)
    for future in [ranks.give(0, "a"), ranks.give(1, "a")]:
        future.result(LIMIT_S)
    ranks.services[0]._progress = ranks.services[1]._progress = time.monotonic() - 1000
    assert ranks.close() == [None, None]


def test_a_rank_0_that_cannot_be_reached_is_an_error_on_all_ranks():
    box = SimpleQueue()

    def agree(said):
        if said is not None:
            box.put(said)
        return said or box.get(timeout=LIMIT_S)

    def host():
        raise socket.gaierror(-2, "Name or service not known")

    for rank in (0, 1):
        with pytest.raises(ConfigError, match=r"rank 0 cannot be reached .*Name or service"):
            TurnService(rank, 2, agree, host=host, credit_nbytes=1, timeout_s=1)


@pytest.mark.parametrize("secret", [b"", b"s" * 32])
def test_who_reads_what_the_group_is_told_joins_only_where_there_is_no_secret(group, secret):
    """A broadcast of gloo's travels in the clear."""
    ranks = group(2, secret=secret)
    meeting = msgspec.msgpack.decode(ranks.said)
    assert secret not in ranks.said or not secret
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger = 0
        reader.curve_publickey, reader.curve_secretkey = curve_pair(meeting["salt"], "node")
        reader.curve_serverkey = curve_pair(meeting["salt"], "scheduler")[0]
        failures = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        monitor = reader.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | failures)
        reader.connect(f"tcp://{meeting['host']}:{meeting['port']}")
        assert monitor.poll(LIMIT_S * 1000)
        event = recv_monitor_message(monitor)["event"]
        assert (event == zmq.EVENT_HANDSHAKE_SUCCEEDED) == (not secret)
        reader.disable_monitor()
        monitor.close(linger=0)
    for future in [ranks.give(0, "a"), ranks.give(1, "a")]:
        future.result(LIMIT_S)
    assert ranks.close() == [None, None]


@pytest.mark.parametrize("whose", [0, 1])
def test_a_secret_that_not_all_ranks_have_is_said(whose):
    box = SimpleQueue()
    secrets = {whose: b"s" * 32}

    def agree(said):
        if said is not None:
            box.put(said)
        return said or box.get(timeout=LIMIT_S)

    leader = TurnService(0, 2, agree, host=lambda: "127.0.0.1", credit_nbytes=1, timeout_s=1,
                         secret=secrets.get(0, b""))
    with pytest.raises(ConfigError, match=rf"only one has a job key \(rank {whose} has\): set BPSFAST_JOB_KEY"):
        TurnService(1, 2, agree, host=None, credit_nbytes=1, timeout_s=1, secret=secrets.get(1, b""))
    leader.abandon(ConfigError("of no use"))


def test_who_has_not_begun_what_is_under_way_is_named(group):
    ranks, event = group(3, timeout_s=0.5), threading.Event()
    futures = [ranks.give(rank, "a", waits_for=event if rank == 1 else None) for rank in range(3)]
    try:
        for future in (futures[0], futures[2]):
            with pytest.raises(StallError, match=r"ranks \[1\] have not begun what is under way: 'a' part 0"):
                future.result(LIMIT_S)
    finally:
        event.set()
    assert isinstance(futures[1].exception(LIMIT_S), StallError | None)  # it began late: in time for the word, or not


def test_what_does_not_end_though_all_have_begun_is_named(group):
    ranks = group(2, timeout_s=0.5)
    ranks.size = 3  # the operation waits for one more
    for future in [ranks.give(rank, "a") for rank in range(2)]:
        with pytest.raises(StallError, match="all have begun, and it does not end: 'a' part 0"):
            future.result(LIMIT_S)
    ranks.size = 2


_FOLLOWER = """
import sys, time
from bpsfast.orchestration.priority.turns import Entry
from bpsfast.collectives.turn_service import TurnService
service = TurnService(1, 2, lambda _: sys.stdin.buffer.read(), host=None, credit_nbytes=1, timeout_s=30)
service.submit(Entry("a", 0, 1, "test"), lambda finish: finish(None), lambda error: print(error, flush=True))
time.sleep(600)
"""


def test_a_process_that_dies_while_rank_0_closes_is_named_at_once():
    with subprocess.Popen([sys.executable, "-c", _FOLLOWER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as follower:
        def agree(said):
            follower.stdin.write(said)
            follower.stdin.close()
            return said

        try:
            leader = TurnService(0, 2, agree, host=lambda: "127.0.0.1", credit_nbytes=1, timeout_s=LIMIT_S)
            leader.submit(Entry("a", 0, 1, "test"), lambda finish: finish(None), lambda error: None)
            assert follower.stdout.readline() == b"None\n"
        finally:
            follower.kill()
        with pytest.raises(PeerLostError, match=r"ranks \[1\] are gone: their connections broke without a last word"):
            leader.close()


def test_ranks_that_differ_are_told_how(group):
    ranks = group(2)
    futures = [ranks.give(0, "a", nbytes=4), ranks.give(1, "a", nbytes=5)]
    for future in futures:
        with pytest.raises(MismatchError, match="4 bytes, test on rank 0, 5 bytes, test here"):
            future.result(LIMIT_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_operation_that_fails_ends_the_group_with_its_words(group, rank):
    ranks = group(2)
    futures = [ranks.give(each, "a", fails=each == rank) for each in (0, 1)]
    for future in futures:
        with pytest.raises(UnsupportedError, match=f"not be begun on rank {rank}: OSError: no such device"):
            future.result(LIMIT_S)


def test_who_fails_to_hear_of_an_error_keeps_nobody_else_from_it(group, caplog):
    ranks = group(1)
    heard = Future()

    def cannot_hear(error):
        raise RuntimeError("no ears")

    begun, go_on = threading.Event(), threading.Event()

    def begin(finish):
        begun.set()
        go_on.wait(LIMIT_S)
        raise OSError("no such device")

    service = ranks.services[0]
    service.submit(Entry("a", 0, 1, "test"), begin, cannot_hear)
    assert begun.wait(LIMIT_S)
    service.submit(Entry("b", 0, 1, "test"), lambda finish: finish(None), heard.set_result)
    go_on.set()
    assert isinstance(heard.result(LIMIT_S), UnsupportedError) and "no ears" in caplog.text


def test_a_rank_that_closed_gives_nothing_more(group):
    ranks = group(2)
    ranks.services[1].close()  # rank 0 hears of it before what it is given next, or after it
    with pytest.raises(PeerLostError, match=r"rank 1 has closed, and will not give .*'a'"):
        ranks.give(0, "a").result(LIMIT_S)


def test_rank_0_closes_when_all_have(group):
    ranks = group(2)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(ranks.services[0].close)
        future = ranks.give(1, "a")
        with pytest.raises(PeerLostError, match="rank 0 has closed, and has never given 'a'"):
            future.result(LIMIT_S)
        assert isinstance(closing.exception(LIMIT_S), PeerLostError)


def test_together_who_waits_for_one_before_he_gives_another_keeps_nobody(group):
    ranks = group(2, credit_nbytes=100, timeout_s=float("inf"), together=True)
    ranks.give(0, "late", priority=9)
    first = [ranks.give(rank, "first") for rank in (0, 1)]
    assert [future.result(LIMIT_S) for future in first] == ["first", "first"]
    assert ranks.give(1, "late").result(LIMIT_S) == "late"
    assert ranks.begun[0] == ranks.begun[1] == ["first", "late"]


@pytest.mark.parametrize("leaver", [0, 1])
def test_together_what_somebody_will_not_give_any_more_fails(group, leaver):
    ranks = group(3, together=True)
    ranks.services[leaver].abandon(ClosedError("rank has left"))
    for rank in {0, 1, 2} - {leaver}:
        with pytest.raises((ClosedError, PeerLostError)):
            ranks.give(rank, "x").result(LIMIT_S)


def test_who_connects_after_the_end_hears_of_it(group):
    ranks = group(3, together=True, absent=[2])
    ranks.services[1].abandon(ClosedError("rank 1 has left"))
    with pytest.raises(ClosedError, match="rank 1 has left"):
        ranks.give(0, "x").result(LIMIT_S)
    ranks.join(2)
    with pytest.raises(ClosedError, match="rank 1 has left"):
        ranks.give(2, "x").result(LIMIT_S)


def test_together_who_closes_in_order_leaves_nobody_waiting(group):
    ranks = group(2, together=True)
    waiting = ranks.give(0, "x")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(ranks.services[1].close)
        with pytest.raises(PeerLostError, match="have closed, and will not all give 'x'"):
            waiting.result(LIMIT_S)
        closing.exception(LIMIT_S)


def test_abandoning_fails_what_is_under_way_on_all_ranks(group):
    ranks = group(2, together=True, timeout_s=float("inf"))
    waiting = [ranks.give(0, "x"), ranks.give(1, "y")]
    ranks.services[1].abandon(ClosedError("rank 1 has left"))
    for future in waiting:
        with pytest.raises(ClosedError, match="rank 1 has left"):
            future.result(LIMIT_S)
    with pytest.raises(ClosedError, match="rank 1 has left"):
        ranks.give(1, "z")
