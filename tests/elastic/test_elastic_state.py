"""The state of an elastic program, without a coordinator: commits, restores, and who gives it to all."""
from __future__ import annotations

import types

import numpy as np
import pytest

import bpsfast
from bpsfast import elastic
from bpsfast.elastic import training
from bpsfast.elastic.training import loss_of
from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.trainer import process


def state_of(weights=None, **more):
    return elastic.ObjectState(weights=np.zeros(4, np.float32) if weights is None else weights, **more)


def test_arrays_are_restored_in_place_and_other_values_as_they_were():
    state = state_of(step=3, notes=["a"])
    weights = state.weights
    weights += 1
    state.step, state.notes = 4, [*state.notes, "b"]
    state.notes.append("c")
    state.restore()
    assert state.weights is weights and weights.tolist() == [0.0] * 4
    assert (state.step, state.notes) == (3, ["a"])
    state.notes.append("d")  # what was kept is not what is given out
    state.restore()
    assert state.notes == ["a"]


@pytest.mark.parametrize("other", [np.ones(5, np.float32), np.ones(4, np.float64), np.ones(4, np.float32)])
def test_an_array_that_has_changed_its_kind_is_replaced(other):
    state = state_of()
    state.weights = other
    if other.size == 4 and other.dtype == np.float32:
        other.flags.writeable = False
    state.restore()
    assert state.weights is not other and state.weights.tolist() == [0.0] * 4


def sync_after_commits():
    """Rank r has committed r % 2 times: those of rank 1 count, which is the lowest one with most."""
    rank = bpsfast.rank()
    state = state_of(np.full(4, rank, np.float32), step=10 * rank)
    weights = state.weights
    for _ in range(rank % 2):
        state.save()
    state.sync()
    found = [weights.tolist(), state.step, state.n_commits, state.weights is weights]
    state.weights += 5
    state.restore()  # what came by sync is kept
    return [*found, state.weights.tolist()]


def test_all_get_the_state_of_the_most_advanced_commit(shared_job):
    assert shared_job(ranks=(2, 1)).run(sync_after_commits) == [[[1.0] * 4, 10, 1, True, [1.0] * 4]] * 3


class Shrinking(elastic.ObjectState):
    """A state that sees a rank lost while it is shared."""

    def give(self, root):
        super().give(root)
        session = process.current()
        session.membership.members = session.membership.members[:-1]


def sync_after_the_state_was_lost(kind):
    """The coordinator knows of 3 commits, and nobody here has made as many; or a rank is lost meanwhile."""
    state = (Shrinking if kind == "meanwhile" else elastic.ObjectState)(weights=np.zeros(4, np.float32), step=7)
    state.n_commits = 2
    members = process.current().membership.members
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "current_client", lambda: types.SimpleNamespace(n_commits=3 if kind == "before" else 2))
        try:
            state.sync()
        except PeerLostError as exc:
            return str(exc)
        finally:
            process.current().membership.members = members
    return "shared"


@pytest.mark.parametrize(("kind", "words"), [
    ("before", "a rank with 3 commits was lost before it could share the state"),
    ("meanwhile", "rank 1 was lost while the state of the training was shared"), ("none", "shared")])
def test_a_state_that_was_lost_is_not_replaced_by_a_newcomers(shared_job, kind, words):
    for found in shared_job(ranks=(2,)).run(sync_after_the_state_was_lost, kind):
        assert found.startswith(words)


def run_without_a_coordinator():
    state, resets = state_of(step=0), []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @elastic.run
    def train(state, by, *, until):
        """The user's own."""
        while state.step < until:
            state.step += by
            state.commit()
        return state.step

    return [train(state, 2, until=6), resets, train.__doc__]


def test_run_without_a_coordinator_calls_once(shared_job):
    assert shared_job(ranks=(2, 1)).run(run_without_a_coordinator) == [[6, [], "The user's own."]] * 3


def fail_without_a_coordinator():
    """Lose somebody in the training function; return what becomes of that, and where the state is then."""
    state = state_of(step=0)

    @elastic.run
    def train(state):
        state.step += 1
        raise PeerLostError("rank 9 is gone")

    try:
        return train(state)
    except PeerLostError as exc:
        return [str(exc), state.step]


def test_run_without_a_coordinator_raises_what_ends_the_call(shared_job):
    assert shared_job(ranks=(2, 1)).run(fail_without_a_coordinator) == [["rank 9 is gone", 1]] * 3


def test_a_loss_is_seen_through_what_was_raised_from_it():
    lost = PeerLostError("x")
    outer = RuntimeError("y")
    outer.__cause__ = lost
    assert loss_of(lost) is lost and loss_of(outer) is lost
    masked = ValueError("z")
    masked.__context__ = lost  # while it was handled: the program's own error
    assert loss_of(masked) is None
    late = StallError("a worker hangs")
    masked.__cause__ = late
    assert loss_of(late) is late and loss_of(masked) is late


@pytest.mark.parametrize(("theirs", "ours"), [("save", "keep"), ("sync", "give")])
def test_a_state_as_horovod_has_it_is_refused_in_words(theirs, ours):
    def nothing(self, *_):
        """Do nothing."""

    with pytest.raises(TypeError, match=rf"Mine defines {theirs}\(\), .* and not {ours}\(\)"):
        type("Mine", (elastic.State,), {theirs: nothing})
    found = type("Mine", (elastic.State,), {theirs: nothing, "keep": nothing, "give": nothing, "restore": nothing})
    found().commit()
    type("Other", (elastic.ObjectState,), {theirs: nothing})  # it has the other


def test_horovods_name_of_check_is_that_of_the_class():
    class Mine(elastic.ObjectState):
        """Counts."""

        def check(self):
            self.n_checks += 1

    state = Mine(n_checks=0)
    state.check_host_updates()
    assert state.n_checks == 1


def test_names_of_horovod():
    assert elastic.HostsUpdatedInterrupt is elastic.WorkersJoined
    assert not issubclass(elastic.WorkersJoined, bpsfast.BpsError)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        elastic.nothing  # noqa: B018
