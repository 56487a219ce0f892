"""Who trains next: whatever is lost, comes or is late, no job has a lost member, and no coordinator runs for ever."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.orchestration.elastic.coordinator import (
    MOST_FRUITLESS,
    ElasticCoordinator,
    ElasticRules,
    Exclude,
    Fail,
    Form,
)


def coordinator(policy="shrink", n=3, nodes=None, **values):
    """A coordinator whose first job of *n* members was formed; *nodes*: the node of each."""
    rules = ElasticRules(**{"lost_worker": policy, "max_ranks": n, "within_s": 10.0, **values})
    found = ElasticCoordinator(rules, range(n))
    for member in range(n):
        assert found.decide(0.0) is None
        found.came(member, str(member if nodes is None else nodes[member]), 0.0)
    assert found.decide(0.0) == Form(1, tuple(range(n)))
    return found


def test_the_first_job_is_complete_when_all_have_come():
    found = coordinator()
    assert found.is_running and found.decide(100.0) is None and found.due_s == float("inf")


def test_a_first_job_that_is_not_complete_in_time_names_who_is_missing():
    found = ElasticCoordinator(ElasticRules(max_ranks=3, within_s=10.0), range(3))
    assert found.decide(1000.0) is None, "nobody has come: they may still be starting"
    found.came(1, "a", 5.0)
    assert found.decide(14.9) is None
    fail = found.decide(15.0)
    assert fail == Fail("StallError", "the next job was not complete within 10 s: worker 0, worker 2 has not come")
    assert found.failure == fail and found.decide(16.0) is None


def test_shrink_goes_on_with_the_others_in_their_order():
    found = coordinator()
    found.ended(1, "was killed by SIGKILL", 1.0)
    found.came(2, "2", 2.0)
    assert found.decide(3.0) is None
    found.came(0, "0", 3.0)
    assert found.decide(3.0) == Form(2, (0, 2))


@pytest.mark.parametrize(("nodes", "lost", "goes_on"), [
    ("012", (0,), True), ("012", (0, 1), False), ("01", (1,), True), ("0123", (2, 3), True), ("0123", (1, 2, 3), False),
    ("000", (0, 2), True), ("0011", (0, 1), True), ("00112", (0, 2), True), ("00112", (2, 3, 4), False)])
def test_a_majority_of_nodes_and_coordinator_goes_on(nodes, lost, goes_on):
    found = coordinator(n=len(nodes), nodes=nodes)
    for member in lost:
        found.ended(member, "is gone", 1.0)
    for member in set(range(len(nodes))) - set(lost):
        found.came(member, nodes[member], 1.0)
    said = found.decide(1.0)
    assert isinstance(said, Form) if goes_on else said.error == "PeerLostError" and "no quorum: rank" in said.reason


@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_without_any_survivor_nobody_has_the_state(policy):
    found = coordinator(policy, n=2, nodes="00")
    found.ended(0, "is gone", 1.0)
    found.ended(1, "is gone", 1.0)
    assert "nobody is left who has the state" in found.decide(1.0).reason and found.to_replace == ()


def test_who_was_not_given_the_state_does_not_begin_anew():
    found = coordinator("wait", n=2, nodes="00")
    found.ended(1, "is gone", 1.0)
    found.replaced(1, 2, 1.0)
    found.came(0, "0", 1.0, has_state=True)
    found.came(2, "0", 1.0)
    assert found.decide(1.0) == Form(2, (0, 2))
    found.ended(0, "is gone, too", 2.0)
    assert found.decide(2.0) is None, "worker 2 may have been given it"
    found.came(2, "0", 3.0)
    assert found.decide(3.0).reason.endswith("the others were not given the state yet")


def test_a_first_job_whose_members_are_all_lost_is_not_waited_for():
    found = ElasticCoordinator(ElasticRules(lost_worker="shrink", max_ranks=2), range(2))
    found.ended(0, "is gone", 1.0)
    assert found.decide(1.0) is None
    found.ended(1, "is gone, too", 2.0)
    assert found.decide(2.0) == Fail("PeerLostError", "rank 0 (worker 0) is gone, rank 1 (worker 1) is gone, too")


def test_abort_goes_on_after_no_loss():
    found = coordinator("abort", max_ranks=4)
    found.ended(1, "was killed by SIGKILL", 1.0)
    assert found.decide(1.0).reason == ("rank 1 (worker 1) was killed by SIGKILL; the policy for lost workers is abort")


def test_wait_gives_the_lost_workers_place_to_its_replacement():
    found = coordinator("wait")
    found.ended(1, "is gone", 1.0)
    assert found.to_replace == (1,)
    found.replaced(1, 3, 1.5)
    assert found.to_replace == ()
    found.came(0, "0", 2.0)
    found.came(2, "2", 2.0)
    assert found.decide(11.4) is None
    found.came(3, "1", 11.4)
    assert found.decide(11.4) == Form(2, (0, 3, 2))


def test_wait_ends_in_words_when_no_replacement_comes():
    found = coordinator("wait", max_replaced=1)
    found.ended(1, "is gone", 1.0)
    found.replaced(1, 3, 1.0)
    for member in (0, 2):
        found.came(member, str(member), 1.0)
    found.ended(3, "is gone, too", 2.0)
    assert found.to_replace == ()
    fail = found.decide(11.0)
    assert fail.error == "StallError"
    assert "1 of 3 ranks are not taken again (rank 1 (worker 1) is gone; 1 replacements were started" in fail.reason


def test_a_replacement_that_is_lost_is_replaced():
    found = coordinator("wait")
    found.ended(1, "is gone", 1.0)
    found.replaced(1, 3, 1.0)
    found.ended(3, "is gone, too", 2.0)
    assert found.to_replace == (1,)


def test_workers_that_join_come_last_and_only_as_many_as_may():
    found = coordinator(n=2, max_ranks=3)
    found.came(5, "5", 1.0)
    found.came(4, "4", 1.0)
    assert found.is_running and found.newcomers == (4,)
    assert found.decide(1.0) is None
    for member in (1, 0):
        found.came(member, str(member), 2.0)
    assert found.decide(2.0) == Form(2, (0, 1, 4))
    assert found.waiting == (5,) and found.newcomers == ()


def test_who_is_silent_is_ended_and_then_the_others_go_on():
    found = coordinator(nodes="000")
    found.ended(0, "is gone", 1.0)
    found.came(1, "0", 2.0)
    assert found.decide(10.9) is None
    assert found.decide(11.0) == Exclude((2,))
    found.ended(2, "was killed by SIGKILL", 11.1)
    assert found.decide(11.1) == Form(2, (1,))


def test_fewer_than_min_ranks_wait_for_more_until_the_deadline():
    found = coordinator(nodes="000", min_ranks=3)
    found.ended(0, "is gone", 1.0)
    for member in (1, 2):
        found.came(member, "0", 1.0)
    assert found.decide(1.0) is None
    found.came(7, "0", 2.0)
    assert found.decide(2.0) == Form(2, (1, 2, 7))
    found.ended(1, "is gone", 20.0)
    for member in (2, 7):
        found.came(member, "0", 20.0)
    assert found.decide(30.0).reason.startswith("no quorum: 2 ranks have come within 10 s, min_ranks is 3")


def again(found, members=(0, 1), reason="a link"):
    """All come, since their job has failed, or was left if there is no *reason*; what is said of the next one."""
    for member in members:
        found.came(member, "0", 1.0, True, reason=reason and f"{reason} {member}")
    return found.decide(1.0)


def test_what_fails_again_and_again_ends_in_words():
    found = coordinator(n=2, nodes="00")
    for number in range(1, 1 + MOST_FRUITLESS):
        assert again(found) == Form(number + 1, (0, 1))
    assert again(found) == Fail("StallError", (
        "4 jobs in a row have failed, the last one number 4, though no worker was lost, and without a commit: "
        "worker 0: a link 0, worker 1: a link 1"))


def test_a_failure_counts_once_and_not_where_somebody_was_lost():
    found = coordinator(n=8, nodes="0" * 8)
    for number in range(1, 7):
        found.ended(number, "is gone", 1.0)
        assert isinstance(again(found, (0, *range(number + 1, 8))), Form), number
    for _ in range(2 * MOST_FRUITLESS):  # suspend and resume
        assert isinstance(again(found, (0, 7), ""), Form)


@pytest.mark.parametrize("what", ["commit", "loss", "newcomer", "resumed"])
def test_jobs_of_which_something_came_may_go_on_and_on(what):
    found = coordinator("wait", n=2, nodes="00", max_ranks=99, max_replaced=99)
    fresh = 2
    for number in range(1, 4 * MOST_FRUITLESS):
        members = [holder.member for holder in found.holders]
        if what == "loss":
            found.ended(members.pop(), "is gone", 1.0)
            found.replaced(found.to_replace[0], fresh, 1.0)
        if what in ("loss", "newcomer"):
            members.append(fresh)
            fresh += 1
        for member in members:
            found.came(member, "0", 1.0, True, n_commits=number if what == "commit" else 1,
                       reason="" if what == "resumed" else "a link")
        assert isinstance(found.decide(1.0), Form), number


def test_when_all_have_left_well_it_is_over():
    found = coordinator(n=2, max_ranks=3)
    found.came(7, "0", 1.0)
    found.left(0)
    assert not found.is_over
    found.left(1)
    assert found.is_over and found.waiting == (7,)


def test_what_is_awaited_is_named():
    found = coordinator("wait", n=2, nodes="00", min_ranks=2, max_ranks=3)
    assert found.awaited == "job 1, of 2 ranks, runs and has let nobody in (State.commit or check)"
    found.ended(0, "is gone", 1.0)
    assert found.awaited.startswith("worker 1 has not come; 1 of 2 ranks are not taken again (rank 0 (worker 0) is")
    found = coordinator("shrink", n=2, nodes="00", min_ranks=2)
    found.ended(0, "is gone", 1.0)
    found.came(1, "0", 1.0)
    assert found.awaited == "1 ranks have come, and min_ranks is 2"


def test_wait_ends_who_is_silent_and_replaces_it():
    found = coordinator("wait")
    for member in (0, 2):
        found.came(member, str(member), 1.0, reason="worker 1 hangs")
    assert found.decide(10.9) is None and found.decide(11.0) == Exclude((1,))
    found.ended(1, "was killed by SIGKILL", 11.1)
    assert found.decide(11.1) is None and found.to_replace == (1,)
    found.replaced(1, 3, 11.2)
    found.came(3, "1", 12.0)
    assert found.decide(12.0) == Form(2, (0, 3, 2))


def test_abort_ends_nobody_who_is_silent():
    found = coordinator("abort", max_ranks=4)
    for member in (0, 2):
        found.came(member, str(member), 1.0)
    assert found.decide(11.0).reason.endswith("worker 1 has not come")


@pytest.mark.parametrize("policy", ["shrink", "wait"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_program_that_fails_on_all_ranks_has_no_further_job(policy, number):
    found = coordinator(policy, n=2) if number else ElasticCoordinator(
        ElasticRules(lost_worker=policy, max_ranks=2), range(2))
    found.ended(1, "ended with exit code 3", 1.0, is_own_failure=True)
    assert found.decide(1.0) is None
    found.ended(0, "ended with exit code 4", 1.1, is_own_failure=True)
    fail = found.decide(1.1)
    assert "rank 1 (worker 1) ended with exit code 3, rank 0 (worker 0) ended with exit code 4" in fail.reason
    assert found.lost == (1, 0) and found.to_replace == ()


@pytest.mark.parametrize("commits", [False, True])
def test_workers_that_fail_by_themselves_again_and_again_are_not_replaced_for_ever(commits):
    found = coordinator("wait", n=2, nodes="00", max_replaced=99)
    for number in range(1, 1 + MOST_FRUITLESS):
        lost = found.holders[1].member
        found.ended(lost, "ended with exit code 1", 1.0, is_own_failure=True)
        found.replaced(lost, lost + 1, 1.0)
        found.came(0, "0", 1.0, True, n_commits=number * commits, reason="the other one is gone")
        found.came(lost + 1, "0", 1.0)
        assert found.decide(1.0) == Form(number + 1, (0, lost + 1), n_commits=number * commits)
    found.ended(4, "ended with exit code 1", 1.0, is_own_failure=True)
    found.replaced(4, 5, 1.0)
    found.came(0, "0", 1.0, True, n_commits=9 * commits, reason="the other one is gone")
    found.came(5, "0", 1.0)
    said = found.decide(1.0)
    if commits:
        assert isinstance(said, Form)
    else:
        assert said.reason == ("4 jobs in a row have failed, the last one number 4, as workers failed by themselves, "
                               "and without a commit: worker 0: the other one is gone, worker 4: ended with exit code "
                               "1")


def test_a_replacement_that_is_started_too_late_joins_as_a_newcomer():
    found = coordinator("wait", n=2, max_ranks=3)
    found.ended(1, "is gone", 1.0)
    found.came(5, "5", 1.0)
    found.came(0, "0", 1.0)
    assert found.decide(1.0) == Form(2, (0, 5))
    found.replaced(1, 6, 2.0)
    found.came(6, "6", 2.0)
    assert found.is_running and found.newcomers == (6,) and found.n_replaced == 1


# -- members that are to leave -----------------------------------------------------------------------------------------

def test_members_that_are_to_leave_leave_with_all_others_and_the_next_job_does_without_them():
    found = coordinator()
    assert found.leave([1]) == () and found.departing == (1,) and found.is_running
    for member in (1, 0):
        found.came(member, str(member), 1.0, has_state=True)
    assert found.decide(1.0) is None
    found.came(2, "2", 1.0, has_state=True)
    assert found.decide(1.0) == Form(2, (0, 2), dismissed=(1,))
    assert found.waiting == () and found.departing == () and found.is_dismissed(1)
    found.left(1)
    assert found.is_running


def test_a_newcomer_gets_the_rank_of_a_member_that_is_to_leave():
    found = coordinator(n=2, max_ranks=2)
    found.came(5, "5", 1.0)
    assert found.newcomers == ()
    found.leave([0])
    assert found.newcomers == (5,) and found.departing == (0,)
    for member in (0, 1):
        found.came(member, str(member), 1.0, has_state=True)
    assert found.decide(1.0) == Form(2, (1, 5), dismissed=(0,))


def test_not_all_leave_before_another_has_the_state():
    found = coordinator(n=2, max_ranks=2)
    found.leave([0, 1])
    assert found.departing == () and found.newcomers == ()
    found.came(5, "5", 1.0)
    assert found.departing == () and found.newcomers == (5,)
    for member in (0, 1):
        found.came(member, str(member), 1.0, has_state=True)
    assert found.decide(1.0) == Form(2, (0, 1, 5))
    assert found.departing == (0, 1), "all have the state once they ask for the next job"
    for member in (0, 1, 5):
        found.came(member, str(member), 2.0, has_state=True)
    assert found.decide(2.0) == Form(3, (5,), dismissed=(0, 1))


def test_members_with_the_state_do_not_leave_those_who_were_not_given_it():
    found = coordinator(n=2, max_ranks=2)
    found.leave([0])
    found.came(0, "0", 1.0, has_state=True)
    found.came(1, "1", 1.0)
    assert found.decide(1.0) == Form(2, (0, 1))


def test_no_member_leaves_a_job_that_would_have_too_few():
    found = coordinator(n=3, min_ranks=3, max_ranks=3)
    found.leave([2])
    assert found.departing == ()
    found.came(7, "7", 1.0)
    assert found.departing == (2,)


@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_member_that_is_lost_before_it_has_left_is_neither_replaced_nor_a_voter(policy):
    found = coordinator(policy)
    found.leave([1, 2])
    for member in (1, 2):
        found.ended(member, "is gone", 1.0)
    assert found.to_replace == ()
    found.came(0, "0", 1.0, has_state=True)
    assert found.decide(1.0) == Form(2, (0,))


def test_a_replacement_that_is_to_leave_before_it_has_come_is_replaced():
    found = coordinator("wait", n=2)
    found.ended(1, "is gone", 1.0)
    found.replaced(1, 2, 1.0)
    assert found.leave([2]) == () and found.to_replace == (1,)
    found.came(2, "1", 2.0)
    assert found.waiting == ()


def test_who_waits_without_a_rank_is_dismissed_at_once():
    found = coordinator(n=2, max_ranks=3)
    found.came(5, "5", 1.0)
    assert found.leave([5, 6]) == (5,) and found.waiting == ()
    found.came(6, "6", 1.0)
    assert found.waiting == () and found.is_running


def test_who_has_left_well_is_not_waited_for_and_after_the_end_nobody_is():
    found = coordinator()
    found.left(0)
    found.ended(1, "is gone", 1.0)
    found.came(2, "2", 1.0)
    assert found.decide(1.0).error == "PeerLostError"  # one of three nodes is left
    found = coordinator("wait")
    found.done()
    found.ended(1, "is gone", 1.0)
    assert found.to_replace == () and found.decide(1000.0) is None and found.due_s == float("inf")


def test_a_job_goes_on_without_a_lost_member_whose_replacement_gets_its_rank():
    found = coordinator("wait", goes_on=True)
    found.ended(1, "was killed by SIGKILL", 1.0)
    assert found.is_running and found.to_replace == (1,) and found.due_s == float("inf") and not found.newcomers
    found.replaced(1, 3, 1.0)
    assert found.decide(1000.0) is None and found.to_replace == ()
    found.came(3, "1", 1001.0)
    assert found.newcomers == (3,) and found.decide(3000.0) is None, "until the job lets it in"
    found.came(0, "0", 3001.0, has_state=True)
    assert not found.is_running and found.decide(3001.0) is None
    found.came(2, "2", 3002.0, has_state=True)
    assert found.decide(3002.0) == Form(2, (0, 3, 2))


def test_nobody_waits_for_a_replacement_that_has_not_come_and_later_it_joins_as_the_last():
    found = coordinator("wait", n=4, goes_on=True)
    for lost, by in ((0, 4), (2, 5)):
        found.ended(lost, "is gone", 1.0)
        found.replaced(lost, by, 1.0)
    for member in (5, 1, 3):
        found.came(member, "a", 2.0, has_state=member != 5)
    assert found.decide(2.0) == Form(2, (1, 5, 3))
    found.came(4, "a", 3.0)
    assert found.newcomers == (4,)
    for member in (1, 5, 3):
        found.came(member, "a", 4.0, has_state=True)
    assert found.decide(4.0) == Form(3, (1, 5, 3, 4))


def test_a_member_that_comes_back_alone_joins_the_others_at_their_next_commit():
    found = coordinator("shrink", n=5, goes_on=True)
    found.came(2, "2", 1.0, has_state=True, reason="its node is lost")
    found.came(4, "2", 1.0, has_state=True, reason="its node is lost")
    assert found.is_running and found.newcomers == (2, 4) and found.due_s == float("inf")
    for member in (0, 1, 3):
        found.came(member, "0", 500.0, has_state=True, n_commits=9)
    assert found.decide(500.0) == Form(2, (0, 1, 2, 3, 4), n_commits=9)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_job_has_failed_for_all_when_half_of_its_living_members_have_come_back(n):
    found = coordinator("shrink", n=n + 1, goes_on=True)
    found.ended(n, "is gone", 1.0)
    for member in range(n):
        assert found.is_running
        found.came(member, "0", 2.0, has_state=True, reason="too few are left")
        if 2 * (member + 1) >= n:
            break
    assert not found.is_running and found.due_s == 12.0


def test_a_job_has_also_failed_when_those_who_have_come_back_are_half_after_a_loss():
    found = coordinator("shrink", n=3, goes_on=True)
    found.came(0, "0", 1.0, has_state=True, reason="its node is lost")
    assert found.is_running
    found.ended(1, "is gone", 2.0)
    assert not found.is_running and found.due_s == 12.0
    found.came(2, "2", 3.0, has_state=True)
    assert found.decide(3.0) == Form(2, (0, 2))


def test_members_that_are_to_leave_stay_until_another_has_their_state():
    found = coordinator("shrink", n=3, goes_on=True)
    found.came(2, "2", 1.0, has_state=True, n_commits=3, reason="its node is lost")
    found.leave([0, 1])
    for member in (0, 1):
        found.came(member, "0", 2.0, has_state=True, n_commits=40)
    assert found.decide(2.0) == Form(2, (0, 1, 2), n_commits=40), "not without those who have trained"
    for member in (0, 1, 2):
        found.came(member, "0", 3.0, has_state=True, n_commits=41)
    assert found.decide(3.0) == Form(3, (2,), dismissed=(0, 1), n_commits=41)


def test_jobs_that_let_a_member_in_again_and_again_have_not_failed():
    found = coordinator("shrink", n=3, goes_on=True)
    for number in range(2, 4 + MOST_FRUITLESS):
        found.came(2, "2", 1.0, has_state=True, reason="its node is lost")
        for member in (0, 1):
            found.came(member, "0", 2.0, has_state=True)
        assert found.decide(2.0).number == number


def test_who_was_left_behind_is_known_until_it_has_come_back_or_is_lost():
    found = coordinator("shrink", n=4, goes_on=True)
    assert found.left_behind([1, 2, 3]) == [1, 2, 3]
    found.came(1, "1", 1.0, has_state=True, reason="its node is lost")
    found.ended(2, "is gone", 1.0)
    assert found.left_behind([1, 2, 3, 9]) == [3]


def test_training_is_over_when_all_but_lost_members_have_left_well():
    found = coordinator("wait", goes_on=True)
    found.ended(0, "is gone", 1.0)
    found.left(1)
    assert not found.is_over
    found.left(2)
    assert found.is_over and found.to_replace == ()


EVENTS = st.lists(st.tuples(st.sampled_from(["come", "end", "fail", "leave", "send away", "start", "replace", "time"]),
                            st.integers(0, 30)), max_size=60)


@given(st.sampled_from(["abort", "shrink", "wait"]), st.integers(1, 5), st.integers(0, 2), st.integers(1, 5), EVENTS)
def test_whatever_happens(policy, n, n_more, min_ranks, events):
    """Random histories, of processes that behave: only who lives comes, and only who was started lives."""
    rules = ElasticRules(lost_worker=policy, min_ranks=min(min_ranks, n), max_ranks=n + n_more, within_s=10.0,
                         max_replaced=3)
    found = ElasticCoordinator(rules, range(n))
    node_of = {member: str(member % 3) for member in range(200)}
    alive, gone, waiting, number, now = set(range(n)), set(), set(), 0, 0.0
    fresh, before = n, tuple(range(n))
    replaced: dict[int, int] = {}
    told: set[int] = set()
    for kind, index in [*events, *[("settle", 0)]]:
        living = sorted(alive)
        who = living[index % len(living)] if living else None
        if kind == "come" and who is not None:
            found.came(who, node_of[who], now)
            waiting |= {who} - (told - set(before))  # else it is dismissed
        elif kind in ("end", "fail") and who is not None:
            found.ended(who, "is gone", now, is_own_failure=kind == "fail")
            alive.discard(who)
            waiting.discard(who)
            gone.add(who)
        elif kind == "leave" and who is not None and who not in waiting:
            found.left(who)
            alive.discard(who)
        elif kind == "send away" and who is not None:
            told.add(who)
            dismissed = found.leave([who])
            assert set(dismissed) == ({who} & waiting - set(before)), "others are told later"
            waiting -= set(dismissed)
        elif kind == "start":
            alive.add(fresh)
            fresh += 1
        elif kind == "replace":
            for lost in found.to_replace:
                assert lost in gone and policy == "wait"
                found.replaced(lost, fresh, now)
                replaced[fresh] = lost
                alive.add(fresh)
                fresh += 1
        elif kind == "time":
            now += index
        elif kind == "settle":  # all who live come, and then the time is over
            for member in living:
                if not found.is_running:
                    found.came(member, node_of[member], now)
                    waiting |= {member} - (told - set(before))
            now += 1000.0
        said = found.decide(now)
        while isinstance(said, Exclude):
            assert policy != "abort" and not set(said.members) & waiting and set(said.members) <= alive
            for member in said.members:
                found.ended(member, "is gone", now)
                alive.discard(member)
                gone.add(member)
            now += 1000.0
            said = found.decide(now)
        if isinstance(said, Form):
            number += 1
            members = said.members
            assert said.number == number and len(set(members)) == len(members) and set(members) <= waiting & alive
            assert rules.min_ranks <= len(members) <= max(rules.max_ranks, len(before)) + len(told & set(before))
            assert set(said.dismissed) <= told & set(before) and not set(said.dismissed) & set(members)
            kept = [member for member in before if member in alive and member not in said.dismissed]
            assert [member for member in members if member in kept] == kept, "survivors keep their order, all of them"
            assert not (told - set(before)) & set(members), "who was sent away gets no rank"
            if policy == "abort":
                assert not gone & set(before)
            if policy == "shrink" and number > 1 and gone & set(before):
                nodes = [{node_of[member] for member in group if not (set(kept) - told and member in told)}
                         for group in (before, kept)]
                assert 2 * (len(nodes[1]) + 1) > len(nodes[0]) + 1, "a majority of nodes and coordinator"
            if policy == "wait" and number > 1:
                holders = [member for member in before if (member in alive and member not in said.dismissed) or (
                    member in gone and member not in told)]
                for member, holder in zip(members, holders):
                    assert member == holder or holder in gone
                assert len(members) >= len(holders)
            waiting -= {*members, *said.dismissed}
            before = members
        elif isinstance(said, Fail):
            break
        if kind == "settle" and not found.is_running and found.failure is None:
            assert not waiting & set(before) or found.is_over, "somebody waits, and nothing will ever be said"


@given(st.sampled_from(["shrink", "wait"]), st.integers(1, 6), st.lists(st.tuples(
    st.sampled_from(["end", "back", "agree", "replace", "replaced"]), st.integers(0, 30)), max_size=40))
def test_a_job_that_goes_on_always_has_a_next_one(policy, n, events):
    """Random losses and returns of one member after another; then all who live come."""
    found = coordinator(policy, n=n, goes_on=True, max_replaced=100)
    running, waiting, starting = set(range(n)), set(), set()  # who trains, who has come, whose program begins
    fresh, agreed = n, False
    for kind, index in [*events, ("settle", 0)]:
        who = sorted(running)[index % len(running)] if running else None
        if kind == "end" and who is not None and len(running) > 1:
            running.discard(who)
            found.ended(who, "is gone", 1.0)
        elif kind in ("back", "agree") and who is not None and len(running) > 1:
            agreed |= kind == "agree"
            running.discard(who)
            waiting.add(who)
            found.came(who, "a", 1.0, has_state=True, reason="" if kind == "agree" else "its node is lost")
        elif kind == "replace":
            for lost in found.to_replace:
                found.replaced(lost, fresh, 1.0)
                starting.add(fresh)
                fresh += 1
        elif kind == "replaced" and starting:
            waiting.add(came := sorted(starting)[index % len(starting)])
            starting.discard(came)
            found.came(came, "a", 1.0)
        elif kind == "settle":
            for member in sorted(running):
                found.came(member, "a", 1.0, has_state=True)
            waiting |= running
        living = [holder.member for holder in found.holders if holder.member in running | waiting]
        if kind != "settle" and found.is_running and found.number == 1:
            assert not agreed and 2 * len(waiting.intersection(living)) < len(living)
            assert set(found.newcomers) == waiting
        formed = found.decide(1.0)
        if isinstance(formed, Form):
            assert set(formed.members) == waiting and not running - waiting, "all who live, and nobody is waited for"
            assert [member for member in formed.members if member in living] == living
            return
        assert formed is None
    raise AssertionError("no next job although all have come")
