"""Notices of real ranks: found by all, refused without harm; a wait for one names who has not published it."""
from __future__ import annotations

import time

import pytest

import bpsfast
from bpsfast.orchestration.job import key_value_store
from bpsfast.trainer import process


def exchange_notices():
    session = process.current()
    session.key_values.publish(f"place:{session.rank}", b"of %d" % session.rank)
    return [session.key_values.lookup(f"place:{rank}", 10, f"rank {rank}") for rank in range(session.size)]


def test_ranks_find_each_other(three):
    assert three.run(exchange_notices) == [[b"of 0", b"of 1", b"of 2"]] * 3


def too_much():
    session = process.current()
    for key, value, kind in (("k", bytes(key_value_store.VALUE_MAX_NBYTES + 1), bpsfast.CapacityError),
                             ("", b"", bpsfast.ConfigError), ("k" * 300, b"", bpsfast.ConfigError)):
        with pytest.raises(kind):
            session.key_values.publish(key, value)
    if session.rank == 0:
        session.key_values.publish("mine", b"")
    bpsfast.barrier()
    if session.rank:
        with pytest.raises(bpsfast.MismatchError, match="rank 0"):
            session.key_values.publish("mine", b"")
    return True


def test_what_is_refused_harms_nobody(three):
    assert three.run(too_much) == [True] * 3
    assert three.run(exchange_notices)[0][2] == b"of 2"


def lone_lookup():
    process.current().key_values.lookup("never", 0.3, "rank 1")


def leave_while_looked_for():
    """Rank 1 leaves in good order while rank 0 waits for its notice: how long that took, and the error."""
    session = process.current()
    bpsfast.barrier()
    begin = time.monotonic()
    if session.rank == 1:
        bpsfast.shutdown()
        return 0.0, ""
    with pytest.raises(bpsfast.StallError) as caught:
        session.key_values.lookup("never", 30, "rank 1")
    return time.monotonic() - begin, str(caught.value)


def test_a_wait_names_who_is_missing(job):
    started = job(ranks=(1, 1))
    started.begin(lone_lookup, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError"
    assert "rank 0 waited 0.3 s for notice 'never': rank 1 (node 1" in outcome.text
    [(elapsed_s, text), _] = started.run(leave_while_looked_for)
    assert elapsed_s < 10 and "rank 1 (node 1" in text and "has called shutdown" in text
    started.kill()
