"""Send, receive and the monitored barrier of a group, between real ranks of one machine and of two."""
from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bpsfast.collectives.group import make_group
from bpsfast.collectives.p2p.protocol import N_ANNOUNCED, ROOM_NBYTES, cost
from bpsfast.orchestration.errors import StallError
from bpsfast.torch.backend.messages import Messages
from bpsfast.torch.backend.operands import operand
from bpsfast.trainer import process


@pytest.fixture(params=[(3,), (2, 1)], ids=["one node", "two nodes"])
def ranks(request, shared_job):
    return shared_job(ranks=request.param)


def whole(timeout_s=20.0):
    session = process.current()
    group = make_group(session, range(session.size), timeout_s)
    return group, Messages(group)


def tensor(rank, n, tag=0):
    return torch.arange(n, dtype=torch.int32) + 1000 * rank + 100_000 * tag


def ring():
    group, messages = whole()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for n in (0, 1, 1000, 3_000_000):
        mine, got = tensor(group.rank, n), torch.zeros(n, dtype=torch.int32)
        sent = messages.send(operand(mine), after, 5)
        received = messages.receive(operand(got), before, 5)
        assert received.wait() and sent.wait()
        assert torch.equal(got, tensor(before, n)) and received.source_rank() == before
        assert received.is_success() and [each is got for each in received.result()] == [True]
    messages.close()
    group.close()


def test_round_the_ring_with_messages_of_any_size(ranks):
    ranks.run(ring)


def tags():
    """The first message may be received last: the tag decides, and for one tag the order."""
    group, messages = whole()
    n_tags = 8
    if group.rank == 0:
        works = [messages.send(operand(tensor(i, 50, tag)), 1, tag) for i in range(2) for tag in range(n_tags)]
        for work in works:
            work.wait()
    elif group.rank == 1:
        for tag in reversed(range(n_tags)):
            for i in range(2):
                got = torch.zeros(50, dtype=torch.int32)
                messages.receive(operand(got), 0, tag).wait()
                assert torch.equal(got, tensor(i, 50, tag)), (tag, i)
    messages.close()
    group.close()


def test_tags_tell_messages_apart(ranks):
    ranks.run(tags)


def from_any():
    group, messages = whole()
    if group.rank == 0:
        seen = []
        for _ in range(group.size - 1):
            got = torch.zeros(20, dtype=torch.int32)
            work = messages.receive(operand(got), None, 3)
            work.wait()
            assert torch.equal(got, tensor(work.source_rank(), 20))
            seen.append(work.source_rank())
        assert sorted(seen) == list(range(1, group.size))
    else:
        messages.send(operand(tensor(group.rank, 20)), 0, 3).wait()
    messages.close()
    group.close()


def test_a_receive_from_anybody_says_from_whom(ranks):
    ranks.run(from_any)


def strided():
    """Views are sent in the order of their elements, and received into their own memory."""
    group, messages = whole()
    if group.rank == 0:
        messages.send(operand(torch.arange(12.0).reshape(3, 4).t()), 1, 0).wait()
    elif group.rank == 1:
        got = torch.zeros(8, 6)
        messages.receive(operand(got[::2, ::2]), 0, 0).wait()
        assert torch.equal(got[::2, ::2].reshape(-1), torch.arange(12.0).reshape(3, 4).t().reshape(-1))
        assert got[1::2].eq(0).all() and got[:, 1::2].eq(0).all()
    messages.close()
    group.close()


def test_views_keep_their_gaps(ranks):
    ranks.run(strided)


def cannot_be_written():
    group, messages = whole()
    if group.rank == 0:
        messages.send(operand(torch.arange(4.0)), 1, 0).wait()
    elif group.rank == 1:
        work = messages.receive(operand(torch.zeros(1).expand(4)), 0, 0)
        with pytest.raises(RuntimeError, match="more than one element"):
            work.wait()
        assert work.is_completed() and not work.is_success()
    messages.close()
    group.close()


def test_a_tensor_that_cannot_be_written_is_an_error_of_its_receive(ranks):
    ranks.run(cannot_be_written)


def come_late(group, messages, tensor, sender, to, tag):
    """Let *sender* send once all ranks of the job are ready."""
    group.session.barrier(20)
    if group.rank == sender:
        messages.send(operand(tensor), to, tag).wait(timedelta(seconds=20))


def late():
    group, messages = whole(timeout_s=0.3)
    if group.rank == 1:
        got = torch.zeros(5)
        work = messages.receive(operand(got), 0, 9)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 waited 0\.3 s for rank 0 to send .*timeout"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match=r"waited 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        group.session.barrier()
        assert work.wait(timedelta(seconds=20)) and torch.equal(got, torch.arange(5.0)), "it went on"
    else:
        come_late(group, messages, torch.arange(5.0), sender=0, to=1, tag=9)
    messages.close()
    group.close()


def test_a_receive_that_is_late_names_its_sender_and_goes_on(ranks):
    ranks.run(late)


def too_late():
    """A message that a failed receive has not taken is there for the next one."""
    group, messages = whole(0.5)
    if group.rank == 0:
        first, second, was_over = torch.zeros(3), torch.zeros(3), []
        with pytest.raises(RuntimeError, match=r"receive from rank 1 was not complete within 0\.5 s"):
            work = messages.receive(operand(first), 1, 6)
            work.get_future().then(lambda future: was_over.append(work._transfer.done())).wait()
            assert was_over == [True]
            work.get_future().wait()
        process.current().barrier(20)
        messages.receive(operand(second), 1, 6).wait(timedelta(seconds=20))
        assert second.tolist() == [1] * 3 and not first.any()
    else:
        come_late(group, messages, torch.ones(3), sender=1, to=0, tag=6)
    messages.close()
    group.close()


def test_a_receive_whose_future_has_failed_takes_no_message(ranks):
    ranks.run(too_late)


def given_up():
    group, messages = whole()
    work = messages.receive(operand(torch.zeros(5)), (group.rank + 1) % group.size, 4)
    waiter_saw = []

    def wait():
        try:
            work.wait()
        except dist.DistBackendError as exc:
            waiter_saw.append(str(exc))

    waiter = threading.Thread(target=wait)
    waiter.start()
    messages.close()
    waiter.join(20)
    assert len(waiter_saw) == 1 and "ClosedError" in waiter_saw[0]
    assert work.is_completed() and isinstance(work.exception(), dist.DistBackendError)
    group.close()


def test_receives_that_nobody_meets_end_with_their_group(ranks):
    ranks.run(given_up)


def dropped():
    """The works are dropped at once; their messages arrive all the same."""
    group, messages = whole()
    n = 500_000
    if group.rank == 0:
        messages.send(operand(tensor(0, n)), 1, 1)
        got = torch.zeros(1)
        messages.receive(operand(got), 1, 2).wait()
    elif group.rank == 1:
        got, done = torch.zeros(n, dtype=torch.int32), threading.Event()
        messages.receive(operand(got), 0, 1).get_future().add_done_callback(lambda future: done.set())
        assert done.wait(20) and torch.equal(got, tensor(0, n))
        messages.send(operand(torch.ones(1)), 0, 2).wait()
    messages.close()
    group.close()


def test_works_that_nobody_keeps(ranks):
    ranks.run(dropped)


def barriers():
    group, messages = whole()
    for names_all in (False, True, False):
        messages.barrier(20.0, names_all)
    messages.close()
    group.close()


def test_a_monitored_barrier_that_all_pass(ranks):
    ranks.run(barriers)


def flooded():
    """Rank 0's answer to rank 1 waits behind what rank 1 does not receive; return who has passed the barrier."""
    group, messages = whole(2.0)
    n = ROOM_NBYTES // cost(1) + N_ANNOUNCED + 1
    flood = [messages.send(operand(torch.ones(1, dtype=torch.uint8)), 1, 4) for _ in range(n if group.rank == 0 else 0)]
    try:
        messages.barrier(2.0, False)
        passed = True
    except StallError:
        passed = False
    group.session.barrier()
    if group.rank == 1:
        for _ in range(n):
            messages.receive(operand(torch.zeros(1, dtype=torch.uint8)), 0, 4).wait(timedelta(seconds=20))
    for work in flood:
        work.wait(timedelta(seconds=20))
    messages.close()
    group.close()
    return passed


def test_who_does_not_take_his_answer_keeps_nobody_else_in_the_barrier(ranks):
    assert ranks.run(flooded) == [False, False, True]


def missing(who, names_all):
    """The ranks *who* miss one barrier; return the others' errors."""
    group, messages = whole()
    said = ""
    if group.rank not in who:
        with pytest.raises(StallError) as raised:
            messages.barrier(0.7, names_all)
        said = str(raised.value)
    group.session.barrier()
    if group.rank in who:
        messages._n_barriers += 1  # it was not there
    messages.barrier(20.0, names_all)  # the group stays usable
    messages.close()
    group.close()
    return said


def test_a_monitored_barrier_names_who_is_missing(ranks):
    first, second, _ = ranks.run(missing, (2,), False)
    assert first == "Rank 2 failed to pass monitoredBarrier in 700 ms"
    assert second == f"Rank 1 successfully reached monitoredBarrier, but rank 0 says: {first}"
    first, *_ = ranks.run(missing, (1, 2), False)
    assert first == "Rank 1 failed to pass monitoredBarrier in 700 ms", "the first one only"
    first, *_ = ranks.run(missing, (1, 2), True)
    assert first == "Ranks 1, 2 failed to pass monitoredBarrier in 700 ms"


def test_without_rank_0_the_others_say_so(ranks):
    _, second, third = ranks.run(missing, (0,), True)
    assert second == third == "Rank 0 failed to pass monitoredBarrier, or has not said within 2.4 s who is missing"


def no_time():
    group, messages = whole()
    if group.rank == 0:
        with pytest.raises(StallError, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
            messages.barrier(0.0, True)
    else:
        messages._n_barriers += 1
    messages.barrier(20.0, True)
    messages.close()
    group.close()


def test_a_barrier_without_time_waits_for_nobody_and_leaves_nothing_behind(ranks):
    ranks.run(no_time)


def channels():
    """Groups of the same ranks, and the barrier of one, keep their messages apart."""
    group, messages = whole()
    other, others = whole()
    if group.rank == 0:
        others.send(operand(torch.full((3,), 2.0)), 1, 0).wait()
        messages.send(operand(torch.full((3,), 1.0)), 1, 0).wait()
    elif group.rank == 1:
        for each, value in ((messages, 1.0), (others, 2.0)):
            got = torch.zeros(3)
            each.receive(operand(got), 0, 0).wait()
            assert np.array_equal(got.numpy(), [value] * 3)
    messages.barrier(20.0, False)
    others.barrier(20.0, False)
    for each in (messages, others, group, other):
        each.close()


def test_groups_keep_their_messages_apart(ranks):
    ranks.run(channels)
