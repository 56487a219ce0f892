"""Horovod's errors for operations that ranks disagree on, submit twice, do not submit, or leave unfinished."""
from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import torch

import bpsfast.hvd as hvd
from bpsfast.orchestration.errors import MismatchError, PeerLostError
from tests.support.hvd_ranks import begin, begun


@pytest.fixture
def pair(shared_job):
    return begun(shared_job(ranks=(2,)))


def mismatches():
    """Submit different operations under one name; return the errors, and whether the ranks still work together."""
    me = hvd.rank()
    wrong = []
    for function, text in (
            (lambda: hvd.allreduce(torch.ones(2 + me), name="a"), "Mismatched ALLREDUCE tensor shapes: One rank sent a "
             r"tensor of shape \[2\], but another rank sent a tensor of shape \[3\]."),
            (lambda: hvd.allreduce(torch.ones(2).to((torch.float32, torch.int64)[me]), name="a"),
             "Mismatched data types: One rank had type float32, but another rank had type int64."),
            (lambda: hvd.allreduce(torch.ones(2), op=(hvd.Sum, hvd.Max)[me], name="a"),
             "Mismatched reduction operation: One rank sent reduction op Sum, but another rank sent reduction op Max."),
            (lambda: hvd.allreduce(torch.ones(2), prescale_factor=me + 1.0, name="a"),
             "Mismatched prescale and/or postscale factors"),
            (lambda: hvd.broadcast(torch.ones(2), me, name="a"), "Mismatched BROADCAST root ranks: One rank specified "
             "root rank 0, but another rank specified root rank 1."),
            (lambda: hvd.allgather(torch.ones(2, me + 1), name="a"),
             "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 1, but another rank "
             "sent a tensor with dimension 1 equal to 2."),
            (lambda: hvd.allgather(torch.ones(()), name="a"), "Process-set rank zero tried to ALLGATHER a rank-zero"),
            (lambda: hvd.grouped_allreduce([torch.ones(1)] * (me + 1), name="a"), "Mismatched ALLREDUCE group sizes"),
            (lambda: hvd.alltoall(torch.ones((4, 2) if me else (4,)), name="a"), "Mismatched ALLTOALL tensor shapes"),
            (lambda: hvd.reducescatter(torch.ones(me + 2), name="a"), "Mismatched REDUCESCATTER tensor shapes")):
        with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
            function()
        if not isinstance(caught.value, MismatchError) or not isinstance(caught.value.__cause__, MismatchError):
            wrong.append(text)
    return wrong, hvd.allreduce(torch.ones(1), name="a", op=hvd.Sum).item()


def test_mismatches_are_told_to_all_and_harm_nobody_else(pair):
    assert pair.run(mismatches) == [([], 2.0)] * 2


def bad_arguments():
    for function, error, text in (
            (lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool)), ValueError,
             "Tensor type torch.BoolTensor is not supported."),
            (lambda: hvd.allreduce_(torch.ones(2, 3).t()), ValueError, "Tensor is required to be contiguous."),
            (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), ValueError,
             "The op parameter supersedes average. Please provide only one of them."),
            (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), NotImplementedError, "Adasum"),
            (lambda: hvd.allreduce(torch.ones(1), op=9), ValueError, "op=9 is no reduction"),
            (lambda: hvd.allreduce(torch.eye(2).to_sparse()), TypeError, "not dense"),
            (lambda: hvd.allreduce([1.0]), TypeError, "expected a torch.Tensor or a NumPy array, got list"),
            (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max), hvd.HorovodInternalError,  # as Horovod's
             "Reducescatter currently only supports AVERAGE and SUM."),
            (lambda: hvd.broadcast(torch.ones(1), 7), ValueError, "invalid root rank 7"),
            (lambda: hvd.alltoall(torch.ones(3)), ValueError, "splits not provided, but first dimension"),
            (lambda: hvd.alltoall(torch.ones(3), [1]), ValueError,
             "Number of entries in splits does not equal number of workers."),
            (lambda: hvd.alltoall(torch.ones(3), [3, 1]), ValueError,
             "Sum of splits entries is greater than the first dimension of tensor."),
            (lambda: hvd.alltoall(torch.ones(3), [4, -1]), ValueError, "negative"),
            (lambda: hvd.alltoall(torch.ones(3), torch.ones(2, 1, dtype=torch.int32)), ValueError,
             "alltoall expects a 1D splits tensor"),
            (lambda: hvd.alltoall(torch.ones(3), torch.ones(2)), ValueError,
             "alltoall expects splits to contain 32-bit integer elements.")):
        with pytest.raises(error, match=text):
            function()
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def test_bad_arguments_are_told_before_anything_is_begun(pair):
    assert pair.run(bad_arguments) == [2.0] * 2


def twice():
    handle = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(1), name="which the other rank never asks for")
        with pytest.raises(ValueError, match=r"Requested to allreduce, allgather, or broadcast a tensor "
                           r"with the same name as another tensor that is currently being processed\."):
            hvd.allreduce_async(torch.ones(1), name="which the other rank never asks for")
    hvd.synchronize(handle)
    return hvd.broadcast(torch.ones(1), 0).item()


def test_a_name_is_given_once_at_a_time(job):
    own = job(ranks=(2,))
    own.run(begin)
    assert own.run(twice) == [1.0] * 2
    own.kill()


@pytest.mark.parametrize("waiting", [0, 1])
def test_who_does_not_come_is_named(job, waiting):
    own = job(ranks=(2,), timeout_s=2)
    own.run(begin)
    error = own.run(alone_on, waiting)[waiting]
    assert error.startswith("StallError allreduce.alone waited 2")
    assert f"missing ranks: {1 - waiting}: [allreduce.alone]" in error
    own.kill()


def alone_on(rank):
    if hvd.rank() != rank:
        return "did not ask"
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="alone")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.barrier()  # nothing more is done
    return f"{type(caught.value).__name__} {caught.value}"


def leaves(rank):
    if hvd.rank() == rank:
        hvd.shutdown()
        return "left"
    with pytest.raises(hvd.HorovodInternalError, match=r"Horovod has been shut down\.") as caught:
        hvd.allreduce(torch.ones(1))
    return type(caught.value).__name__


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_has_left(job, rank):
    own = job(ranks=(2,))
    own.run(begin)
    expected = ["PeerLostError"] * 2
    expected[rank] = "left"
    assert own.run(leaves, rank) == expected


def dies(rank):
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(hvd.allreduce_async(torch.ones(1)))
    return type(caught.value).__name__, f"rank {rank}" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_ends_all_operations(job, rank):
    own = job(ranks=(2, 1), transport="tcp")
    own.run(begin)
    outcomes = own.attempt(dies, rank)
    assert outcomes[rank].error == "died"
    assert [outcome.value for i, outcome in enumerate(outcomes) if i != rank] == [("PeerLostError", True)] * 2
    own.kill()


def warned():
    heard = threading.Event()

    class Hearing(logging.Handler):
        def emit(self, record):
            self.text = record.getMessage()
            heard.set()

    hearing = Hearing()
    logging.getLogger("bpsfast.hvd").addHandler(hearing)
    handle = hvd.allreduce_async(torch.ones(1), name="late") if hvd.rank() == 0 else None
    if hvd.rank() == 0:
        assert heard.wait(20)
    hvd.broadcast(torch.ones(1), 0, name="rank 0 has heard it")
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="late"))
    return hearing.text if hvd.rank() == 0 else ""


def test_a_long_wait_is_told_of(job):
    own = job(ranks=(2,), stall_warn_s=0.5)
    own.run(begin)
    text, _ = own.run(warned)
    assert text.startswith("One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ")
    assert "\nMissing ranks:\n" in text and "\n1: [allreduce.late]" in text


def forked():
    handle = hvd.allreduce_async(torch.ones(1), name="forked") if hvd.rank() == 0 else None
    if hvd.rank() == 0:
        pid = os.fork()
        if pid == 0:
            codes = 0
            for function in (lambda: hvd.synchronize(handle), hvd.barrier, hvd.rank):
                try:
                    function()
                except RuntimeError:  # ClosedError
                    codes += 1
            os._exit(codes)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="forked"))
    return True


def test_a_fork_is_told_that_it_is_one(pair):
    assert pair.run(forked) == [True] * 2


def test_who_cannot_note_what_is_executed_harms_nobody(caplog):
    from bpsfast.hvd.service import NegotiationService, Operation
    from bpsfast.orchestration.priority.negotiation import Request

    service = NegotiationService((0,), 0, None, lambda response, operations: None, lambda: True, fusion_nbytes=0,
                                 warn_s=0.0, timeout_s=20.0)
    noted = []

    def note(response, *_):
        noted.append(response.names)
        raise OSError("no space left on device")

    service.observer = note
    for name in ("first", "second"):
        operation = service.submit(Operation(Request(rank=0, name=name, kind="barrier")))
        assert operation._over.wait(10), f"{name} is over"
        operation.wait()
    assert service.close() and noted == [("first",)] and "cannot be noted" in caplog.text


@pytest.mark.parametrize("failing", [False, True])
def test_who_connects_after_the_end_hears_of_it(failing, monkeypatch):
    from bpsfast.hvd import service
    from bpsfast.orchestration.priority import negotiation
    from bpsfast.orchestration.priority.negotiation import Request

    def execute(response, operations):
        raise AssertionError("nothing is negotiated")

    def check():
        if failing:
            raise PeerLostError("rank 7 is lost")
        return False

    def made(rank, line, check):
        return service.NegotiationService((0, 1), rank, line, execute, check, fusion_nbytes=0, warn_s=0.0,
                                          timeout_s=100.0)

    monkeypatch.setattr(service.NegotiationService, "_LATE_NOTICE_S", 100.0)
    key = os.urandom(32)
    line = negotiation.listen(key, "127.0.0.1")
    first = made(0, line, check)
    while first._error is None:  # it has ended before anybody has come
        assert first._thread.is_alive()
    second = made(1, negotiation.connect("127.0.0.1", line.port, key, "rank 0"), lambda: True)
    with pytest.raises(PeerLostError, match="rank 7 is lost" if failing else "Rank 0 has left"):
        operation = second.submit(service.Operation(Request(rank=1, name="x", kind="barrier")))  # may know it already
        assert operation._over.wait(30), "the operation of the other rank did not end"
        operation.wait()
    assert second.close() and first.close()
