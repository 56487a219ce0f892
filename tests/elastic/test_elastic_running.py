"""`elastic.run` through real jobs of one rank: what ends a call of the training function, and what follows."""
from __future__ import annotations

import contextlib

import numpy as np
import pytest

import bpsfast
from bpsfast import elastic
from bpsfast.elastic.coordinator_client import TrainingOver, WorkerDismissed, current_client, open_client
from bpsfast.elastic.training import run_in_jobs
from bpsfast.orchestration.elastic.protocol import Add, Added, Come, Done, Over
from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.trainer import exit_handling, process
from tests.support.coordinators import KEY, RealCoordinator, ends, settings_of, until


class Training:
    """A training function that does one thing at each call, and what it has seen."""

    def __init__(self, *deeds):
        self.deeds, self.steps, self.jobs = list(deeds), [], []
        self.run = elastic.run(self._train)

    def _train(self, state, *arguments):
        """The user's own."""
        self.steps.append(state.step)
        self.jobs.append(current_client().job if current_client() is not None else 0)
        return self.deeds.pop(0)(state, *arguments)


class State(elastic.ObjectState):
    """A state of the only rank, which has nobody to give it to: real ones sum for that, with kernels of their own."""

    def sync(self):
        self.n_commits = max(1, self.n_commits)
        self.keep()


class Elastic:
    """A coordinator of one rank, and this process, which has joined its first job."""

    def __init__(self, coordinator, monkeypatch, kind=State, **rules):
        self.made = coordinator(1, **{"lost_worker": "shrink", **rules})
        self.service = self.made.service
        self.member = open_client(settings_of(self.made.address))
        self.joined, join = [], self.member.join
        self.member.join()
        monkeypatch.setattr(self.member, "join", lambda *words: (self.joined.append(words), join(*words)))
        self.resets = []
        self.state = kind(step=0, weights=np.zeros(4, np.float32))
        self.state.register_reset_callbacks([lambda: self.resets.append(self.member.job)])

    def is_over(self):
        """Let somebody else say that the training has ended; returns once that is known."""
        other = self.made.speaker(9)
        other.say(Done)
        other.say(Come, node="b")
        assert isinstance(other.hears(Over), Over)


@pytest.fixture
def coordinator(no_leaks, monkeypatch):
    """A way to make musters; this process belongs to none in the end."""
    with contextlib.ExitStack() as stack:
        def make(n, **rules):
            made = RealCoordinator(n, **rules)
            stack.callback(made.close)
            return made

        with ends(monkeypatch):
            yield make


@pytest.fixture
def begun(coordinator, monkeypatch):
    """A way to begin an elastic training of one rank."""
    return lambda **rules: Elastic(coordinator, monkeypatch, **rules)


def lose(state):
    """A step that is committed, one that is not, and a loss, as a library would pass it on."""
    state.step += 1
    state.save()
    state.step += 10
    state.weights += 1
    raise RuntimeError("the step failed") from PeerLostError("rank 1 is gone")


def finish(state):
    state.step += 100
    return state.step


def finish_without_a_node(state):
    """The training has come to its end, but whether all others have will never be known."""
    process._watch.daemons.node.kill()
    return finish(state)


def test_run_joins_a_job_and_tells_all_when_it_has_ended(coordinator, monkeypatch):
    made = coordinator(1, max_ranks=2)
    for name, value in (("COORDINATOR", made.address), ("JOB_KEY", KEY.hex()), ("MEMBER", "0")):
        monkeypatch.setenv(f"BPSFAST_{name}", value)
    training = Training(lambda state, *arguments: (bpsfast.size(), current_client().has_state, *arguments))
    assert training.run.__doc__ == "The user's own." and process.session() is None
    waiting = made.speaker(7)
    assert training.run(elastic.ObjectState(step=3), "x", 5) == (1, True, "x", 5)
    assert (training.steps, training.jobs) == ([3], [1])
    waiting.say(Come, node="b")
    assert isinstance(waiting.hears(Over), Over), "nobody is let in any more"


def test_a_lost_worker_leads_back_to_the_last_commit_in_the_next_job(begun, caplog):
    job = begun(kind=elastic.ObjectState)
    weights = job.state.weights
    training = Training(lose, finish)
    assert training.run(job.state) == 101
    assert (training.steps, training.jobs, job.resets) == ([0, 1], [1, 2], [2])
    assert job.state.weights is weights and weights.tolist() == [0.0] * 4
    assert job.joined == [(2, "rank 1 is gone")], "sync counts as the first commit"
    assert "back to the last commit, because the job has lost a worker: rank 1 is gone" in caplog.text


def test_a_worker_that_hangs_leads_back_to_the_last_commit_as_a_lost_one(begun, caplog):
    job = begun(lost_worker="wait")

    def wait_in_vain(state):
        state.step += 1
        state.save()
        state.step += 10
        raise StallError("rank 1 has not pushed")

    training = Training(wait_in_vain, finish)
    assert training.run(job.state) == 101
    assert (training.steps, training.jobs, job.joined) == ([0, 1], [1, 2], [(2, "rank 1 has not pushed")])
    assert "because the job waits for a worker in vain: rank 1 has not pushed" in caplog.text


def test_a_part_of_an_api_ends_with_each_job_and_begins_in_the_next_also_if_it_cannot_end_in_order(begun):
    job, seen = begun(), []

    def leaving():
        """End, though the ranks that it wants to tell are gone."""
        seen.append(("leaves", process.session() is not None))
        raise PeerLostError("nobody to tell")

    training = Training(lose, finish)
    run = run_in_jobs(training._train, lambda: seen.append(("joined", job.member.job)), leaving)
    assert run(job.state) == 101 and training.jobs == [1, 2]
    assert seen == [("joined", 1), ("leaves", True), ("joined", 2)]


def test_workers_that_join_cost_no_step(begun):
    job = begun(kind=elastic.ObjectState, max_ranks=2)
    newcomer = job.made.speaker(7)

    def let_in(state):
        """Do a step, and let the newcomer in, who is lost at this very moment."""
        newcomer.say(Come, node="b")
        until(job.member, job.member.newcomers)
        state.save()
        state.step = 6
        try:
            state.check()
        finally:
            job.service.ended(7, "is gone")
            asking = job.made.speaker(-9)
            asking.say(Add, count=0)
            assert asking.hears(Added) == Added(0, ""), "what came before has been heard"

    training = Training(let_in, finish)
    assert training.run(job.state) == 106
    assert (training.steps, training.jobs, job.resets) == ([0, 6], [1, 2], [2])
    assert job.joined == [(2, "")]
    exit_handling._wait_for_jobs()  # the daemons of the first job, as at the end of a program


def test_a_loss_before_the_training_function_is_called_is_as_any_other_and_may_be_the_last(begun):
    job = begun()

    class Unlucky(State):
        """Loses somebody in its first sync, and all in the reset that follows."""

        def sync(self):
            self.step = 77
            raise PeerLostError("in sync")

        def reset(self):
            job.service.give_up("no quorum: nobody is left")
            raise PeerLostError("in on_reset")

    training, state = Training(finish), Unlucky(step=5)
    with pytest.raises(PeerLostError, match="no quorum: nobody is left"):
        training.run(state)
    assert (training.jobs, state.step, process.session()) == ([], 5, None)
    assert job.joined == [(0, "in sync"), (0, "in on_reset")]
    assert not job.member.has_state, "nobody was given anything yet"


def test_what_is_the_programs_own_is_raised(begun):
    job = begun()
    for error in (ValueError("a bug of the user"), KeyboardInterrupt()):
        def fail(state, error=error):
            try:
                raise PeerLostError("handled")
            except PeerLostError:
                raise error  # noqa: B904  (which is not raised *from* the loss)

        training = Training(fail, finish)
        with pytest.raises(type(error)) as caught:
            training.run(job.state)
        assert caught.value is error and training.jobs == [1] and job.joined == []
        assert process.session() is not None, "its end, with the error, is the program's"


def test_the_policy_abort_raises_the_loss_as_it_came(begun):
    job = begun(lost_worker="abort")
    training = Training(lose, finish)
    with pytest.raises(RuntimeError, match="the step failed"):
        training.run(job.state)
    assert job.state.step == 11 and job.joined == []


def test_the_policy_abort_raises_a_stall_as_it_came(begun):
    job = begun(lost_worker="abort")

    def wait_in_vain(state):
        raise StallError("rank 1 has not pushed")

    with pytest.raises(StallError, match="rank 1 has not pushed"):
        Training(wait_in_vain, finish).run(job.state)
    assert job.joined == []


@pytest.mark.parametrize("has_returned", [False, True])
def test_a_worker_that_is_dismissed_ends_well_although_its_training_may_have_ended(begun, monkeypatch, has_returned):
    job = begun()

    def dismissed(*words):
        raise WorkerDismissed("its host is taken away")

    monkeypatch.setattr(job.member, "join", dismissed)
    training = Training(finish_without_a_node if has_returned else lose)
    with pytest.raises(WorkerDismissed, match="its host is taken away") as caught:
        training.run(job.state)
    assert caught.value.code == 0 and process.session() is None


def test_whose_training_has_ended_without_it_ends_well(begun, caplog):
    job = begun()

    def be_late(state):
        job.is_over()
        lose(state)

    training = Training(be_late, finish)
    with pytest.raises(TrainingOver):
        training.run(job.state)
    assert len(training.jobs) == 1
    assert caplog.messages[-1] == "the training has ended without this worker, which came too late"


# -- a loss after the training function has returned -------------------------------------------------------------------

def test_a_loss_at_the_end_is_none_if_another_has_seen_the_end(begun):
    job = begun()

    def end(state):
        job.is_over()
        return finish_without_a_node(state)

    training = Training(end, finish)
    assert training.run(job.state) == 100
    assert training.jobs == [1] and job.state.step == 100, "the result is not taken back"
    assert [n_commits for n_commits, _ in job.joined] == [1]


def test_a_loss_at_the_end_leads_back_if_nobody_has_seen_the_end(begun):
    job = begun()
    training = Training(finish_without_a_node, finish)
    assert training.run(job.state) == 100
    assert (training.steps, training.jobs, job.resets) == ([0, 0], [1, 2], [2])
    ((n_commits, reason),) = job.joined
    assert n_commits == 1 and reason.startswith("node 0") and "was killed by SIGKILL" in reason
