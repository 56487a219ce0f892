"""The guarded port: what the native port raises becomes an error that says who is to blame."""
import os
import select
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from bpsfast.orchestration.errors import ClosedError, PeerLostError, StallError
from bpsfast.orchestration.messages import StallAnswer
from bpsfast.pyx import ring
from bpsfast.pyx.direct import Channel
from bpsfast.pyx.port import FINGERPRINT, Port
from bpsfast.trainer.chunk_descriptors import CHUNK_DTYPE
from bpsfast.trainer.guarded_port import GuardedPort
from bpsfast.trainer.membership import Membership
from bpsfast.trainer.stall_inspector import StallInspector


@pytest.fixture
def board():
    made = bytearray(4096 + 64)
    ring.format_board(made)
    return made


UNIT = SimpleNamespace(name="x", first_part=0, n_parts=1, members={"x": None}, needed=())


def answer(missing="nobody", hopeless=False):
    return StallAnswer(rank=3, question=1, stage="push", missing=missing, hopeless=hopeless)


def asking(ask=lambda part, round, name: answer(), has_departures=False):
    """Return a stall query that a scheduler would answer so."""
    return SimpleNamespace(ask=ask, has_departures=lambda: has_departures)


def guarded_on(board, require_open=lambda: None, calls=None, **options):
    """Return a guarded port of rank 3 with a lane of one entry, of a node that takes nothing."""
    lane, bell = bytearray(256 + 32), bytearray(ring.DOORBELL_NBYTES)
    ring.format_lane(lane)
    ring.format_doorbell(bell)
    return GuardedPort(Port(lane, board, bell, -1, **options), "rank 3", "node 1 (pid 77)", require_open,
                       **{"stall_query": asking(), "inspector": StallInspector("rank 3", 0, lambda: None),
                          "start_deferred": lambda: False, "make_channel": Channel, "deferred": {},
                              "membership": Membership(4, False, lambda: 0, None, 1.0, lambda *lost: {}),
                          "node_lost": lambda: PeerLostError("the node is gone")} | (calls or {}))


@pytest.fixture
def full(board):
    """A guarded port whose lane is full."""
    guarded = guarded_on(board, patience_s=0.2)
    guarded.submit(0, 1, 1, 0, 0)
    yield guarded
    assert guarded.close(1)


def test_a_node_that_hangs_is_named(full):
    with pytest.raises(StallError, match=r"node 1 \(pid 77\) has taken nothing from a full lane for 0\.2 s"):
        full.submit(0, 1, 1, 0, 0)


def abort(board, reason):
    """Write on the board what the engine does."""
    board[64 : 64 + len(reason)] = reason
    board[4:8] = (1).to_bytes(4, "little")


def test_an_abort_while_the_lane_is_full_is_what_the_job_was_aborted_with(full, board):
    abort(board, b"PeerLostError: rank 2 is lost")
    with pytest.raises(PeerLostError, match=r"^rank 2 is lost$"):
        full.submit(0, 1, 1, 0, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")  # the latter: JAX's
def test_a_forked_child_is_refused_although_a_lock_was_held(board, pidfd_of):
    owner = os.getpid()

    def require_open():
        if os.getpid() != owner:
            raise ClosedError("a fork")

    guarded = guarded_on(board, require_open)
    ended = []

    def wait():
        with pytest.raises(PeerLostError, match="enough"):
            guarded.wait(UNIT, 0, 1, 1, 60.0)
        ended.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not guarded._inside:
        os.sched_yield()
    child = os.fork()
    if child == 0:
        try:
            guarded.check()
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(1)
    end = pidfd_of(child)
    in_time = select.select([end], [], [], 20.0)[0]
    if not in_time:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "a ClosedError at once"
    abort(board, b"PeerLostError: enough")
    waiter.join(20)
    assert ended and guarded.close(1)


def test_nobody_comes_in_while_the_port_closes(board):
    answers = iter([ClosedError("closed in between")])

    def require_open():
        answer = next(answers)
        if answer is not None:
            raise answer

    guarded = guarded_on(board, require_open)
    assert guarded.close(1)
    with pytest.raises(ClosedError, match="in between"):
        guarded.check()


def test_a_wait_for_who_has_left_ends_soon_and_only_then(board):
    questions = []

    def ask(part, round, name):
        questions.append((part, round, name))
        return answer("missing: rank 0: has called shutdown", len(questions) == 2)

    guarded = guarded_on(board, calls={"stall_query": asking(ask, has_departures=True)})
    with pytest.raises(StallError, match=r"^rank 3 waited [\d.]+ s for round 1 of 'x' \(.*\): missing: rank 0"):
        guarded.wait(UNIT, 0, 1, 1, 60.0)
    assert questions == [(0, 1, "x")] * 2, "the first answer was that it may still come"
    assert guarded.close(1)


def test_while_nobody_has_left_nobody_is_asked_before_the_end(board):
    questions = []
    guarded = guarded_on(board, calls={"stall_query": asking(lambda *asked: questions.append(asked) or answer())})
    with pytest.raises(StallError, match=r"waited 1\.2 s"):
        guarded.wait(UNIT, 0, 1, 1, 1.2)
    assert len(questions) == 1
    assert guarded.close(1)


def chunks(*parts):
    """Chunks of these partitions, first round, that give and take nothing."""
    found = np.zeros(len(parts), CHUNK_DTYPE)
    found["part"], found["round"] = parts, 1
    return found


def test_a_pipelined_transfer_names_who_is_missing_from_the_first_chunk_that_is_not_out(board):
    questions = []
    guarded = guarded_on(board, calls={"stall_query": asking(
        lambda *asked: questions.append(asked) or answer("missing: rank 0: has not pushed"))})
    board[4096:4100] = (1).to_bytes(4, "little")
    subjects = []

    def subject_of(i):
        subjects.append(i)
        return UNIT, 0, i + 1

    two = chunks(0, 0)
    two["round"] = 1, 2
    with pytest.raises(StallError, match=r"rank 3 waited 0\.7 s for round 2 of 'x' .*: missing: rank 0"):
        guarded.pipelined_transfer(two, 1, subject_of, 0.7)
    assert questions == [(0, 2, "x")] and set(subjects) == {1}
    assert guarded.close(1)


@pytest.mark.parametrize(("fingerprint", "agree"), [((7, 2**64 - 8), True), ((7, 7), False)])
def test_a_pipelined_transfer_says_whether_fingerprints_agree(board, fingerprint, agree):
    guarded = guarded_on(board)
    seen = np.array(fingerprint, np.uint64)
    one = chunks(0)
    one["flags"], one["result"] = FINGERPRINT, seen.ctypes.data
    board[4096:4100] = (1).to_bytes(4, "little")
    assert guarded.pipelined_transfer(one, 1, lambda i: (UNIT, 0, 1), 10) is agree
    assert guarded.close(1)


def test_a_pipelined_transfer_raises_what_the_job_was_aborted_with(board):
    guarded = guarded_on(board)
    abort(board, b"PeerLostError: rank 2 is lost")
    with pytest.raises(PeerLostError, match=r"^rank 2 is lost$"):
        guarded.pipelined_transfer(chunks(0), 1, lambda i: (UNIT, 0, 1), 60.0)
    assert guarded.close(1)


def test_a_pipelined_transfer_through_a_lane_that_stays_full_ends_in_time(full):
    with pytest.raises(StallError, match=r"has taken nothing from a full lane|waited 0\.7 s"):
        full.pipelined_transfer(chunks(0), 1, lambda i: (UNIT, 0, 1), 0.7)


def test_a_pipelined_transfer_ends_when_the_session_is_closed_by_another_thread(board):
    is_open = True

    def require_open():
        if not is_open:
            raise ClosedError("the session is closed")

    guarded, errors = guarded_on(board, require_open), []

    def pipelined_transfer():
        try:
            guarded.pipelined_transfer(chunks(0), 1, lambda i: (UNIT, 0, 1), 60.0)
        except ClosedError as exc:
            errors.append(exc)

    waiter = threading.Thread(target=pipelined_transfer)
    waiter.start()
    while not guarded._inside:
        os.sched_yield()
    is_open = False
    assert guarded.close(10)
    waiter.join(10)
    assert len(errors) == 1


def test_what_a_caller_raises_between_two_slices_ends_the_call(board):
    guarded = guarded_on(board)

    def subject_of(i):
        raise ClosedError("given up")

    with pytest.raises(ClosedError, match="given up"):
        guarded.pipelined_transfer(chunks(0), 1, subject_of, 60.0)
    assert guarded.close(1)
