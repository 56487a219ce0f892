"""In which order ranks execute what they ask for in orders of their own: held against a naive model."""
from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.orchestration.priority import negotiation
from bpsfast.orchestration.priority.negotiation import Coordinator, Request, Response, Spec


def make(n=2, fusion_nbytes=0, warn_s=0.0, timeout_s=100.0):
    return Coordinator(range(n), fusion_nbytes, warn_s, timeout_s)


def ask(rank, name, kind="allreduce", *shapes, dtype="float32", op="Sum", **fields):
    specs = tuple(Spec(f"{name}.{i}", dtype, 4, shape) for i, shape in enumerate(shapes or ((2,),)))
    return Request(rank=rank, name=name, kind=kind, specs=specs, op=op, **fields)


def names(responses):
    return [name for response in responses for name in response.names]


# -- the naive model: look at everything again after every event ---------------------------------------------------


class Naive:
    """Keeps every event, and finds what is decided by looking at all of them after each one."""

    def __init__(self, n):
        self.n, self.asked, self.joined, self.decided = n, [], [], []

    def submit(self, rank, name):
        if name is None:
            self.joined.append(rank)
        else:
            self.asked.append((rank, name))
        for _, pending in list(self.asked):  # in the order of the first request for each name
            if self.ready(pending):
                self.asked = [entry for entry in self.asked if entry[1] != pending]
                self.decided.append(pending)
        if len(self.joined) == self.n:
            self.decided.append(("joined", rank))
            self.joined = []

    def ready(self, name):
        there = {rank for rank, asked in self.asked if asked == name}
        return bool(there) and there | set(self.joined) == set(range(self.n))


@st.composite
def events(draw):
    """Some ranks, and what they do: each rank submits names of its own order, again once they are over, and joins."""
    n = draw(st.integers(1, 4))
    steps = draw(st.lists(st.tuples(st.integers(0, n - 1), st.sampled_from(["a", "b", "c", "d", None])), max_size=40))
    return n, steps


@given(events())
@settings(max_examples=400, deadline=None)
def test_what_is_decided_and_when(scenario):
    n, steps = scenario
    coordinator, naive = make(n), Naive(n)
    decided, waiting, joined = [], set(), set()
    for rank, name in steps:
        if (rank, name) in waiting or rank in joined:
            continue  # a rank asks again only after the response, and does nothing while it has joined
        if name is None:
            joined.add(rank)
            coordinator.submit(Request(rank=rank, name="join", kind="join"), 0.0)
        else:
            waiting.add((rank, name))
            coordinator.submit(ask(rank, name), 0.0)
        naive.submit(rank, name)
        for response in coordinator.responses():
            assert response.error == ""
            if response.kind == "join":
                decided.append(("joined", response.last_joined))
                joined.clear()
            else:
                (only,) = response.names
                decided.append(only)
                waiting = {entry for entry in waiting if entry[1] != only}
        assert decided == naive.decided


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.randoms())
def test_a_join_that_is_overtaken_is_not_the_last(n_steps, random):
    """Who has joined takes part in the others' steps before its request is heard."""
    coordinator, order = make(len(n_steps)), list(range(len(n_steps)))
    random.shuffle(order)
    for rank in order:
        coordinator.submit(Request(rank=rank, name="join", kind="join", n_steps=n_steps[rank]), 0.0)
    (response,) = coordinator.responses()
    most = [rank for rank in order if n_steps[rank] == max(n_steps)]
    assert response.last_joined == most[-1]


# -- who disagrees --------------------------------------------------------------------------------------------------


def test_a_difference_is_told_to_all_and_harms_nothing_else():
    coordinator = make()
    for rank, shape in enumerate([(2,), (3,)]):
        coordinator.submit(ask(rank, "x", "allreduce", shape), 0.0)
    (response,) = coordinator.responses()
    assert response.error.startswith("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but")
    assert response.names == ("x",)
    assert coordinator.failure is None
    for rank in range(2):
        coordinator.submit(ask(rank, "x"), 0.0)
    assert coordinator.responses() == [Response(kind="allreduce", names=("x",), specs=(ask(0, "x").specs,), op="Sum")]


@pytest.mark.parametrize(("kind", "text"), [
    ("allgather", "Allgather is not supported with Join at this time. Specify sparse_as_dense=True"),
    ("alltoall", "Alltoall is not supported with Join"), ("broadcast", "Broadcast is not supported with Join"),
    ("reducescatter", "Reducescatter is not supported with Join"),
])
def test_most_operations_cannot_do_without_those_who_joined(kind, text):
    coordinator = make()
    coordinator.submit(ask(0, "x", kind), 0.0)
    coordinator.submit(Request(rank=1, name="join", kind="join"), 0.0)
    (response,) = coordinator.responses()
    assert response.error.startswith(text)


# -- what the response says -----------------------------------------------------------------------------------------


def test_rows_splits_and_the_roots_shape_come_with_the_response():
    coordinator = make(3)
    for rank in range(3):
        coordinator.submit(ask(rank, "g", "allgather", (rank, 2), (rank + 5,)), 0.0)
        coordinator.submit(ask(rank, "a", "alltoall", (6,), splits=(rank, 1, 2)), 0.0)
        coordinator.submit(ask(rank, "b", "broadcast", (7,) if rank == 2 else None, root=2), 0.0)
    gathered, exchanged, broadcast = coordinator.responses()
    assert gathered.counts == ((0, 1, 2), (5, 6, 7))
    assert exchanged.counts == ((0, 1, 2), (1, 1, 2), (2, 1, 2))
    assert broadcast.specs[0][0].shape == (7,)


def test_small_allreduces_of_one_kind_are_executed_as_one():
    coordinator = make(1, fusion_nbytes=24)
    for name, fields in (("a", {}), ("b", {}), ("c", {}), ("d", {}), ("e", {"op": "Max"}), ("f", {"op": "Max"})):
        coordinator.submit(ask(0, name, **fields), 0.0)
    coordinator.submit(ask(0, "g", op="Max", dtype="int32"), 0.0)
    coordinator.submit(ask(0, "h", "allgather"), 0.0)
    assert [response.names for response in coordinator.responses()] == [
        ("a", "b", "c"), ("d",), ("e", "f"), ("g",), ("h",)]


# -- those who do not come ------------------------------------------------------------------------------------------


def test_each_of_many_allreduces_is_looked_at_once(monkeypatch):
    shapes = []
    monkeypatch.setattr(negotiation, "prod", lambda shape: shapes.append(shape) or math.prod(shape))
    coordinator = make(1, fusion_nbytes=8 * 150)
    for i in range(200):
        coordinator.submit(ask(0, f"t{i}"), 0.0)
    assert [len(response.names) for response in coordinator.responses()] == [150, 50]
    assert len(shapes) == 200, "of the first rank's time between two steps"


def test_a_wait_is_told_in_horovods_words_and_told_again_when_it_has_doubled():
    coordinator = make(3, warn_s=10)
    coordinator.submit(ask(1, "x"), 0.0)
    coordinator.submit(ask(1, "y"), 5.0)
    coordinator.submit(ask(2, "y"), 5.0)
    assert coordinator.warning(9.9) is None
    text = coordinator.warning(10.0)
    assert text.startswith("One or more tensors were submitted to be reduced, gathered or broadcasted by subset of "
                           "ranks and are waiting for remainder of ranks for more than 10 seconds.")
    assert text.endswith("Missing ranks:\n0: [x]\n2: [x]")
    assert coordinator.warning(14.9) is None
    assert coordinator.warning(15.0).endswith("Missing ranks:\n0: [y]")
    assert coordinator.warning(20.0).endswith("Missing ranks:\n0: [x]\n2: [x]")


def test_a_wait_that_is_too_long_ends_everything_and_names_the_missing():
    coordinator = make(3, timeout_s=10)
    coordinator.submit(ask(1, "x"), 0.0)
    coordinator.check_timeouts(10.0)
    assert coordinator.failure is None
    coordinator.check_timeouts(10.1)
    assert isinstance(coordinator.failure, StallError)
    assert "missing ranks: 0: [x]; 2: [x]" in str(coordinator.failure)
    for rank in range(3):
        coordinator.submit(ask(rank, "x"), 11.0)
    assert coordinator.responses() == []


@pytest.mark.parametrize("is_patient", [True, False])
def test_a_join_is_waited_for_as_long_as_others_work(is_patient):
    coordinator = make(timeout_s=10)
    coordinator.submit(Request(rank=1, name="join", kind="join", is_patient=is_patient), 0.0)
    for now in range(0, 100, 9):
        coordinator.submit(ask(0, "x"), now)
        coordinator.check_timeouts(now)
    assert len(coordinator.responses()) == 12
    coordinator.check_timeouts(120)
    assert (coordinator.failure is None) == is_patient
    if not is_patient:
        assert "ranks [1] have joined, and nothing came from ranks [0]" in str(coordinator.failure)


@pytest.mark.parametrize("first", ["ask", "leave"])
@pytest.mark.parametrize("kind", ["allreduce", "join"])
def test_nobody_waits_for_a_rank_that_has_left(first, kind):
    coordinator = make()
    for step in ("ask", "leave") if first == "ask" else ("leave", "ask"):
        if step == "ask":
            coordinator.submit(ask(0, "x", kind), 0.0)
        else:
            assert coordinator.failure is None
            coordinator.leave(1)
    assert isinstance(coordinator.failure, PeerLostError)
    assert str(coordinator.failure).startswith("Horovod has been shut down.")
    assert "rank 1 has left" in str(coordinator.failure)


@pytest.mark.parametrize("kind", ["allreduce", "join"])
def test_nobody_waits_for_what_a_rank_has_asked_for_that_has_left(kind):
    coordinator = make(3)
    coordinator.submit(ask(1, "x", kind), 0.0)
    coordinator.leave(1)
    assert isinstance(coordinator.failure, PeerLostError)
    assert f"rank 1 has left, and takes no part in {'x' if kind == 'allreduce' else 'join'}" in str(coordinator.failure)


def test_a_rank_that_leaves_after_all_is_done_harms_nobody():
    coordinator = make()
    for rank in range(2):
        coordinator.submit(ask(rank, "x"), 0.0)
    coordinator.leave(1)
    assert names(coordinator.responses()) == ["x"]
    assert coordinator.failure is None
