"""A worker's client of the coordinator: what it sends, whom it believes, when it gives up, and its process."""
from __future__ import annotations

import logging
import os
import re
import secrets
import select
import time
from datetime import timedelta

import pytest

from bpsfast.base.settings import load
from bpsfast.elastic import coordinator_client as client_module
from bpsfast.elastic.coordinator_client import (
    CoordinatorClient,
    TrainingOver,
    WorkerDismissed,
    current_client,
    open_client,
)
from bpsfast.launch import elastic_service
from bpsfast.orchestration.elastic import protocol
from bpsfast.orchestration.elastic.protocol import (
    Come,
    Dismissed,
    Done,
    Formed,
    Hello,
    Newcomers,
    Over,
    Prepared,
    Refused,
    Value,
    Void,
    Wait,
    Want,
)
from bpsfast.orchestration.errors import BpsError, CapacityError, ConfigError, MismatchError, PeerLostError, StallError
from bpsfast.trainer import process
from tests.support.coordinators import (  # fixtures
    KEY,
    LIMIT_S,
    FakeCoordinator,
    coordinator as coordinator,
    end as end,
    settings_of,
    until,
    until_connected,
)


@pytest.fixture
def fake(no_leaks):
    fake = FakeCoordinator()
    yield fake
    fake.close()


@pytest.fixture
def known(fake, end):
    """The fake, and a worker of number 2 that it knows."""
    member = end(fake.address, 2, node_id="mine")
    assert fake.hear(1) == [Hello(2)]
    return fake, member


@pytest.mark.parametrize("missing", [{"job_key": ""}, {"member": -1}])
def test_who_was_not_started_as_a_worker_is_told_so(no_leaks, missing):
    with pytest.raises(ConfigError, match="workers of an elastic job are started by `bpsfast run --elastic` or"):
        CoordinatorClient(load({"coordinator": "127.0.0.1:1", "job_key": KEY.hex(), "member": 0, **missing}, {}))


def test_a_worker_that_is_to_leave_is_told_so_and_ends_well(known):
    fake, member = known
    fake.say(Newcomers(1, 0, 5), Newcomers(0, 0, 2))
    until(member, lambda: member.leavers() == 2)
    assert member.newcomers() == 0
    fake.say(Dismissed("its host is taken away"))
    with pytest.raises(WorkerDismissed, match="its host is taken away") as caught:
        member.join()
    assert caught.value.code == 0 and isinstance(caught.value, TrainingOver)


# -- the next job ------------------------------------------------------------------------------------------------------

def test_who_comes_says_what_it_has_and_why(known, end):
    fake, member = known
    fake.say(Over())
    member.has_state = True
    with pytest.raises(TrainingOver):
        member.join(7, "a link")
    (come,) = fake.hear(1)
    assert (come.member, come.has_state, come.n_commits, come.reason) == (2, True, 7, "a link")
    nodes = []
    for number, node_id in ((3, "mine"), (4, "another")):
        other = end(fake.address, number, node_id=node_id)
        assert fake.hear(1) == [Hello(number)]
        fake.say(Over())
        with pytest.raises(TrainingOver):
            other.join()
        (said,) = fake.hear(1)
        assert said == Come(number, said.node, is_ready=False)
        nodes.append(said.node)
    assert nodes[0] == come.node != nodes[1]


def test_training_that_is_over_ends_the_program_well(known):
    fake, member = known
    fake.say(Over())
    with pytest.raises(SystemExit, match="the training has ended without this worker, which came too late") as caught:
        member.join()
    assert isinstance(caught.value, TrainingOver) and caught.value.code == 0 and member.job == 0


@pytest.mark.parametrize(("error", "kind"), [
    ("StallError", StallError), ("MismatchError", MismatchError), ("BpsError", BpsError), ("KeyError", PeerLostError),
    ("", PeerLostError), ("error_of", PeerLostError), ("__doc__", PeerLostError)])
def test_a_refusal_is_raised_as_what_it_names(known, error, kind):
    fake, member = known
    fake.say(Refused(error, "no quorum: nobody"))
    said = f"{error}: " if error and kind is PeerLostError else ""  # a name that is no class of errors is shown
    with pytest.raises(BpsError, match=rf"^{said}no quorum: nobody$") as caught:
        member.join()
    assert type(caught.value) is kind and process.session() is None


def test_a_coordinator_that_ends_while_it_is_waited_for_is_lost(known):
    fake, member = known
    until_connected(member)
    fake.close()
    with pytest.raises(PeerLostError, match=r"the coordinator \(bpsfast run\)'s process is gone"):
        member.join()


def test_silence_from_the_start_names_the_address_and_the_key(coordinator, end):
    made = coordinator(1)
    member = end(made.address, 0, job_key=secrets.token_hex(32), start_timeout_s=0.4)
    begin = time.monotonic()
    with pytest.raises(StallError, match=rf"worker 0: no process answers at {made.address}, .* has it ended, or is"):
        member.join()
    assert 0.4 <= time.monotonic() - begin < 5.0


def test_a_word_now_and_then_is_enough_to_wait_on_and_on(coordinator, end, monkeypatch, caplog):
    monkeypatch.setattr(protocol, "WORD_EVERY_S", 0.1)
    monkeypatch.setattr(elastic_service, "_LOOK_S", 0.05)
    made = coordinator(1, max_ranks=2)
    first = made.speaker(0)
    first.say(Come, node="a")
    assert first.hears(Formed).size == 1
    member = end(made.address, 1, start_timeout_s=2.0, stall_warn_s=0.8)
    until_connected(member)

    class Listener(logging.Handler):
        """Ends the training once the wait was told of three times, which is longer than silence may last."""

        def emit(self, record):
            if len(caplog.messages) == 3:
                first.say(Done)

    listener = Listener()
    logging.getLogger("bpsfast.elastic").addHandler(listener)
    try:
        with pytest.raises(TrainingOver):
            member.join()
    finally:
        logging.getLogger("bpsfast.elastic").removeHandler(listener)
    for text in caplog.messages:
        assert re.fullmatch(r"worker 1 waits for its next job for \d+ s: job 1, of 1 ranks, runs and has let nobody in "
                            r"\(State.commit or check\)", text)


def test_newcomers_count_for_the_job_that_they_wait_for(known):
    fake, member = known
    fake.say(Formed(1, 0, 1, "wait"))
    member._await_job(0, "")
    assert (member.job, member.lost_worker, member.newcomers()) == (1, "wait", 0)
    fake.say(Newcomers(1, 2))
    until(member, member.newcomers)
    assert member.newcomers() == 2
    fake.say(Formed(2, 0, 3, "wait"))
    member._await_job(0, "")
    assert member.newcomers() == 0
    fake.say(Newcomers(1, 5), Void(2, "heard"))
    until(member, member._why_void)
    assert member.newcomers() == 0, "that was said of the job before"
    fake.say(Newcomers(2, 1))
    until(member, member.newcomers)
    assert member.newcomers() == 1


@pytest.mark.parametrize("formed", ["while it prepares itself", "after that"])
def test_a_newcomer_to_a_running_job_starts_its_daemons_before_it_is_let_in(known, monkeypatch, formed):
    fake, member = known
    kept = []

    def keep(commands, environ):
        kept.append((tuple(commands), "PATH" in environ))
        if formed == "while it prepares itself":
            fake.say(Formed(2, 0, 1, "wait"))

    def are_ready(timeout_s):
        if formed == "after that":
            fake.say(Formed(2, 0, 1, "wait"))
            return True
        return False

    monkeypatch.setattr(member._spares, "keep", keep)
    monkeypatch.setattr(member._spares, "are_ready", are_ready)
    fake.say(Wait("the others", prepares=True), Wait("the others", prepares=True))
    member._await_job(0, "")
    assert kept == [(("scheduler", "node"), True)], "once"
    come, *others = fake.hear(2 if formed == "after that" else 1)
    assert not come.is_ready and others == ([Prepared(member.number)] if formed == "after that" else [])
    fake.say(Formed(3, 0, 1, "wait"))
    member._await_job(0, "")
    assert fake.hear(1)[0].is_ready == (formed == "after that")


# -- the store of a job ------------------------------------------------------------------------------------------------

@pytest.fixture
def joining(known):
    """The fake, and a worker that joins job 2."""
    fake, member = known
    fake.say(Formed(2, 0, 2, "shrink"))
    member._await_job(0, "")
    fake.hear(1)
    return fake, member


def test_a_value_is_wanted_once_and_taken_from_its_own_job_alone(joining):
    fake, member = joining
    fake.say(Value(1, "k", "old"), Value(2, "k", "ключ"), Value(3, "k", "of the future"))
    store = client_module._Store(member, 2)
    store.wait(["k"], timedelta(seconds=LIMIT_S))
    assert store.get("k") == "ключ".encode() and member.value(2, "k", 0.0) == "ключ"
    assert fake.hear(1) == [Want(2, 2, "k")]
    fake.say(Formed(3, 0, 2, "shrink"))
    member._await_job(0, "")
    with pytest.raises(TimeoutError, match=r"nobody has set k within 0\.1 s"):
        member.value(3, "k", 0.1)
    assert [type(message) for message in fake.hear(2)] == [Come, Want]


def test_who_waits_for_a_value_hears_that_its_job_is_void(joining):
    fake, member = joining
    fake.say(Void(1, "of the job before"))
    with pytest.raises(TimeoutError):
        member.value(2, "k", 0.2)
    fake.say(Void(2, "worker 1 is gone"))
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^worker 1 is gone$"):
        member.value(2, "other", LIMIT_S)
    assert time.monotonic() - begin < LIMIT_S / 2 and member._why_void() == "worker 1 is gone"


def test_a_store_counts_by_itself(joining):
    _, member = joining
    store = client_module._Store(member, 2)
    assert [store.add("a", 1), store.add("b", 5), store.add("a", 2)] == [1, 5, 3]
    assert client_module._Store(member, 3).add("a", 1) == 1


def test_the_limit_of_a_value_is_the_last_that_is_stored(coordinator, end):
    made = coordinator(2)
    second = made.speaker(1)
    second.say(Come, node="a")
    member = end(made.address, 0)
    member._await_job(0, "")
    key = "k" * protocol.MOST_KEY_LENGTH
    value = "é" * ((protocol.MOST_VALUE_NBYTES - protocol.stored_nbytes(key, "")) // 2)
    assert protocol.stored_nbytes(key, value) == protocol.MOST_VALUE_NBYTES
    with pytest.raises(CapacityError, match=f"has {protocol.MOST_VALUE_NBYTES + 1} bytes with its key of 256"):
        member.put(1, key, value + "x")
    with pytest.raises(CapacityError, match="with its key of 257 characters; the coordinator stores"):
        member.put(1, key + "k", "")
    member.put(1, key, value)
    second.say(Want, job=1, key=key)
    assert second.hears(Value) == Value(1, key, value), "what was refused was not said"


# -- the process it belongs to -----------------------------------------------------------------------------------------

def test_a_process_enlists_once_and_closes_once(fake, end):
    assert current_client() is None
    member = open_client(settings_of(fake.address, 2))
    try:
        assert open_client(settings_of("127.0.0.1:1", 5)) is member is current_client()
        assert fake.hear(1) == [Hello(2)]
        member.done()
    finally:
        member.close()
    member.close()
    assert fake.hear(1) == [Done(2)], "what was said before the end is sent"


def test_a_fork_has_no_part_in_it_and_takes_nothing_along(fake, end, pidfd_of):
    settings = settings_of(fake.address, 2)
    member = open_client(settings)
    try:
        assert fake.hear(1) == [Hello(2)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                was_none = current_client() is None
                member.close()
                own = open_client(settings)
                is_own = own is not member and own.pid == os.getpid() and current_client() is own
                own.done()
                own.close()
                code = 0 if was_none and is_own and not member._channel._context.closed else 2
            finally:
                os._exit(code)
        assert select.select([pidfd_of(child)], [], [], LIMIT_S)[0], "the child has not ended"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert fake.hear(2) == [Hello(2), Done(2)], "the child's own"
        member.done()
        assert fake.hear(1) == [Done(2)] and current_client() is member
    finally:
        member.close()
