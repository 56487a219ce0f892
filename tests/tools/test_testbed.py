"""Several machines measured at once, over tcp: all together, what cannot be, one that is gone, an interruption."""
from __future__ import annotations

import contextlib
import signal
import threading
import time

import msgspec
import pytest

from bpsfast.base import settings
from bpsfast.orchestration.errors import BpsError, PeerLostError, StallError
from bpsfast.tools.perf import control as lines, perf_plan as plans
from bpsfast.tools.tune.search import ConfigRefusedError
from bpsfast.tools.tune.testbed import RailPair, TuneServer, TuneTestbed
from tests.tools.test_tunables import rail

KEY = b"k" * 32
LOADED = settings.load({}, {})
PLAN = plans.make("bw", {"transport": "tcp", "iterations": 20, "sizes": (5000,), "timeout_s": 10.0})


@contextlib.contextmanager
def listening(n, wait_s=20.0):
    """Have *n* partners; yield where, and the threads that serve, which end with an error or when they are told."""
    where, threads = [], []
    with contextlib.ExitStack() as undo:
        for _ in range(n):
            sock = undo.enter_context(lines.listen(0, "127.0.0.1"))
            threads.append(Served(TuneServer(sock, KEY, LOADED, lambda words: None), wait_s))
            where.append(("127.0.0.1", sock.getsockname()[1]))
        yield where, threads
        for (host, port), thread in zip(where, threads):
            if thread.is_alive():
                field([(host, port)]).ask("end")
            thread.join(20)
            assert not thread.is_alive()


class Served(threading.Thread):
    def __init__(self, partner, wait_s):
        super().__init__()
        self.partner, self.wait_s, self.error = partner, wait_s, None
        self.start()

    def run(self):
        try:
            self.partner.serve(self.wait_s)
        except BpsError as exc:
            self.error = exc


def field(where, timeout_s=10.0):
    return TuneTestbed(where, KEY, LOADED, 5.0, timeout_s)


def ways(n):
    return [RailPair(number, rail(), rail()) for number in range(n)]


@pytest.mark.parametrize("n", [1, 3])
def test_all_ways_are_measured_at_once(n):
    with listening(n) as (where, _):
        for _ in range(2):
            rows = field(where).measure(PLAN, ways(n))
            assert [row["messages"] for row in rows] == [20] * n


def test_facts_come_from_every_machine_and_the_end_reaches_it():
    with listening(2) as (where, threads):
        found = field(where).ask("facts")
        assert len(found) == 2 and all(side.host and side.cores for side in found)
        field(where).ask("end")
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive() and thread.error is None


def test_what_cannot_be_is_refused_while_all_machines_are_there():
    with listening(2) as (where, _):
        bad = msgspec.structs.replace(PLAN, moderation=99)
        with pytest.raises(ConfigRefusedError, match=r"-Q 99"):
            field(where).measure(bad, ways(2))
        assert field(where).measure(PLAN, ways(2))


def test_a_machine_that_is_gone_is_named():
    with listening(1) as (where, threads), lines.listen(0, "127.0.0.1") as free:
        gone = ("127.0.0.1", free.getsockname()[1])
        free.close()
        with pytest.raises(PeerLostError, match=rf"127.0.0.1:{gone[1]} does not listen any more: .*no process answers"):
            TuneTestbed([*where, gone], KEY, LOADED, 0.3, 5.0).measure(PLAN, ways(2))
        assert threads[0].is_alive()


def test_one_that_dies_in_the_middle_ends_the_others_too():
    """A partner that shuts its door after the first connection, and leaves that without an answer."""
    with listening(1) as (where, _), lines.listen(0, "127.0.0.1") as sock:
        def die():
            accepted = lines.accept(sock, KEY, 10.0, 10.0)
            sock.close()
            accepted.close()

        dying = threading.Thread(target=die)
        dying.start()
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"the measurement with 127\.0\.0\.1 ended: .*Nothing was changed"):
            TuneTestbed([*where, sock.getsockname()[:2]], KEY, LOADED, 5.0, 10.0).measure(PLAN, ways(2))
        dying.join(10)
        assert time.monotonic() - began_s < 30
        assert field(where).measure(PLAN, ways(1))


def test_an_interruption_ends_all_of_it():
    with listening(1) as (where, threads):
        endless = msgspec.structs.replace(PLAN, duration_s=60.0)
        timer = threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,))
        began_s = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            field(where).measure(endless, ways(1))
        timer.join()
        assert time.monotonic() - began_s < 20
        assert threads[0].is_alive() and field(where).measure(PLAN, ways(1))


def test_another_key_is_another_job():
    with listening(1) as (where, _), pytest.raises(BpsError, match="key"):
        TuneTestbed(where, b"x" * 32, LOADED, 5.0, 5.0).ask("facts")


# -- the side that listens -------------------------------------------------------------------------------------------

def test_nobody_comes():
    with listening(1, wait_s=0.3) as (_, threads):
        threads[0].join(10)
    assert isinstance(threads[0].error, StallError) and "nobody connected within 0.3 s to port" in str(threads[0].error)


def test_somebody_came_and_never_again():
    with listening(1, wait_s=0.5) as (where, threads):
        field(where).ask("facts")
        threads[0].join(10)
    assert isinstance(threads[0].error, PeerLostError)
    assert "127.0.0.1 has measured nothing for 0.5 s" in str(threads[0].error)


def test_a_question_of_another_version_is_answered_in_words():
    with listening(1) as (where, _), pytest.raises(BpsError, match="'dance' is not a known question"):
        field(where).ask("dance")
