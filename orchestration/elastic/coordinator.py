"""Decides which workers train next in an elastic job. Pure; `bpsfast.launch.elastic_service` carries it out.

A job's members are fixed. When one of them is lost, or others want to join, the job ends and the next one is formed of
those that have come to the coordinator. Processes are *members*, numbered in the order in which they were started; the
members of a job are the *holders* of its ranks, in the order of ranks.

    policy    a lost member               the next job is complete when                    else, by the deadline
    abort     ends everything             (no member is lost, and all have come)           -
    shrink    is left out                 all others have come; they are a majority        absent members are ended
    wait      another takes its rank      every rank is taken                              absent members are ended;
                                                                                           then StallError

A member is lost if its process is killed or fails, if its host is lost, or if it was ended because it was absent. If
all members of a job fail by themselves, the program is wrong, and there is no next job.

Members may be told to *leave*, as their host is taken away. The members of the running job that are to leave go with
all others to the next job, which is formed without them, once the ranks agree (`departing`): no step is lost, and they
end well. They stay in the job while those who would be left have no state, or are fewer than `min_ranks`; newcomers get
further ranks meanwhile, so a job has more than `max_ranks` members until these have the state.

*A job that goes on* (the setting on_worker_loss = continue) finishes its step without a lost member, and is not ended
here: a replacement gets the lost member's rank when the job lets it in, and the job does not wait for it. A
member that lives may be left behind, too, because its node was lost. It comes back alone, and joins in the same way;
once half of the living members have come back, the job has failed for all. Such a job has a majority rule and a least
size (min_workers) of its own.

*Majority* is of the last job's voters: its nodes with ranks, and the coordinator itself. The coordinator is one
process, which all must reach, so two halves of a job can never both go on; a majority is required because a job that
has lost most of itself should not silently train on. Under every policy a member that has the state must be left.

Jobs may end although no member is lost: a link fails, a limit is too low. Or a member fails by itself, and so does the
one that is started for it. If the same happens again and again, without a commit in between, another job will not help:
after `MOST_FRUITLESS` of them there is none.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

LostWorker = Literal["abort", "shrink", "wait"]
#: The most jobs in a row that may fail without a commit, and without a lost member that did not fail by itself.
MOST_FRUITLESS = 3
_MOST_NAMES = 8


class ElasticRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has set for lost workers.

    `within_s`: how long forming a job may take, from the last loss on (or the first arrival). `max_replaced`: the most
    lost workers that are replaced while the program runs. `goes_on`: a running job goes on without lost members.
    """

    lost_worker: LostWorker = "abort"
    min_ranks: int = 1
    max_ranks: int
    within_s: float = 300.0
    max_replaced: int = 10
    goes_on: bool = False


class RankHolder(NamedTuple):
    """The member that has a rank in a job, and its node ("": not known before the first job)."""

    member: int
    node: str


class Form(NamedTuple):
    """The next job.

    Its number, its members by rank, those that have left the last job as they were told, and how often the one of its
    members has committed that has most commits.
    """

    number: int
    members: tuple[int, ...]
    dismissed: tuple[int, ...] = ()
    n_commits: int = 0


class Fail(NamedTuple):
    """There will be no next job: the name of a class of `errors`, and the reason."""

    error: str
    reason: str


class Exclude(NamedTuple):
    """These members have not come in time: end them. Once they have ended they are lost."""

    members: tuple[int, ...]


class ElasticCoordinator:
    """Records which members have come or are lost, and decides who forms the next job.

    *members*: those of the first job, by rank. Times are seconds of one clock, given by the caller.
    """

    def __init__(self, rules: ElasticRules, members: Sequence[int]) -> None:
        self.rules = rules
        self.number = 0  # of the job that was formed last
        self.holders = tuple(RankHolder(member, "") for member in members)
        self.is_running = False
        self.is_over = False  # a rank has ended its training, together with all others
        self.failure: Fail | None = None
        self.n_replaced = 0
        self._come: dict[int, str] = {}  # members that wait -> their nodes
        self._lost: dict[int, str] = {}  # holder -> how it ended
        self._left: set[int] = set()  # holders that ended well
        self._instead: dict[int, int] = {}  # a lost holder -> the member that was started for it
        self._began_s: float | None = None
        self._with_state: set[int] = set()  # members that live
        self._has_begun = False  # whether a member has had a state, which must not be lost
        self._commits_of: dict[int, int] = {}  # by member, when it came last
        self._n_commits = 0  # of the training, as far as arrived members have told
        self._n_commits_before = 0  # when the last job was formed
        self._failed: dict[int, str] = {}  # holder -> why the last job has failed, as it says
        self._own_failures: set[int] = set()  # lost holders that failed by themselves
        self._has_ended_badly = False  # the last job, for all of its members
        self._leaving: set[int] = set()  # members that are to leave
        self._n_fruitless = 0  # jobs in a row

    def came(self, member: int, node: str, now_s: float, has_state: bool = False, n_commits: int = 0,
             reason: str = "") -> None:
        """Note that *member* has come from *node*, and waits for the next job.

        *has_state*: it has the state of the training, which has had *n_commits* commits. *reason*: why its last job has
        failed, if it has.
        """
        if self.is_dismissed(member):
            return
        self._come[member] = node
        self._n_commits = max(self._n_commits, n_commits)
        self._commits_of[member] = n_commits
        if reason and self.holds_rank(member):
            self._failed[member] = reason
        if has_state:
            self._with_state.add(member)
            self._has_begun = True
        if self.holds_rank(member) and not (reason and self._goes_on()):
            self._has_ended_badly |= self.is_running and bool(reason)
            self.is_running = False
        if self._began_s is None and not self.is_running:
            self._began_s = now_s

    def ended(self, member: int, how: str, now_s: float, is_own_failure: bool = False) -> None:
        """Note that *member*'s process was lost: *how* in words.

        *is_own_failure*: it ended with an error of its own.
        """
        self._come.pop(member, None)
        self._with_state.discard(member)
        self._commits_of.pop(member, None)
        self._instead = {holder: other for holder, other in self._instead.items() if other != member}
        if self.holds_rank(member):
            self._lost[member] = how
            if is_own_failure:
                self._failed[member] = how
                self._own_failures.add(member)
            if not self._goes_on():
                self._has_ended_badly |= self.is_running
                self.is_running = False
                self._began_s = now_s

    def leave(self, members: Iterable[int]) -> tuple[int, ...]:
        """Note that *members* are to leave as soon as the others can go on without them (`departing`).

        Returns those that have come and have no rank, who need not wait.
        """
        told = set(members)
        self._leaving |= told
        self._instead = {holder: other for holder, other in self._instead.items() if other not in told}
        dismissed = tuple(member for member in self.waiting if self.is_dismissed(member))
        for member in dismissed:
            del self._come[member]
        return dismissed

    def is_dismissed(self, member: int) -> bool:
        """Whether *member* is to leave, and has no rank that would keep it."""
        return member in self._leaving and not self.holds_rank(member)

    def left_behind(self, ranks: Iterable[int]) -> list[int]:
        """Return the members with *ranks*, which the last job went on without, that are not known to be lost, and have
        not come back either."""
        holders = [self.holders[rank].member for rank in ranks if rank < len(self.holders)]
        return [member for member in holders if not {member} & {*self._come, *self._lost, *self._left}]

    def left(self, member: int) -> None:
        """Note that *member*'s process has ended well. If all have, there is nothing left to join."""
        self._come.pop(member, None)
        if self.holds_rank(member):
            self._left.add(member)
            gone = {*self._left, *(self._lost if self.rules.goes_on else ())}
            self.is_over = self.is_over or all(holder.member in gone for holder in self.holders)

    def done(self) -> None:
        """Note that the training has ended on all ranks: there is no next job, and no member is missed any more."""
        self.is_over = True

    def replaced(self, member: int, by: int, now_s: float) -> None:
        """Note that *by* was started for the lost *member*."""
        self.n_replaced += 1
        if member not in self._lost:  # a job was formed meanwhile, and *by* joins as any other newcomer
            return
        self._instead[member] = by
        if not self.is_running:
            self._began_s = now_s

    def holds_rank(self, member: int) -> bool:
        """Whether *member* is in the last job, or is to be in the first."""
        return any(holder.member == member for holder in self.holders)

    @property
    def lost(self) -> tuple[int, ...]:
        """The members of the last job that are lost, in the order of their ends."""
        return tuple(self._lost)

    @property
    def departing(self) -> tuple[int, ...]:
        """The members of the last job that the next one is formed without, because they are to leave.

        None while those who would be left have no state or an older one, or are fewer than `min_ranks` with the
        newcomers.
        """
        survivors = [holder.member for holder in self._survivors()]
        staying = [member for member in survivors if member not in self._leaving]
        others = sum(not self.holds_rank(member) for member in self._come)
        if not staying or len(staying) + others < self.rules.min_ranks:
            return ()
        newest = max((self._commits_of.get(member, 0) for member in survivors if member in self._come), default=0)
        if not self.is_running and self._has_begun and not any(
                member not in self._come or (member in self._with_state and self._commits_of.get(member, 0) >= newest)
                for member in staying):
            return ()
        return tuple(member for member in survivors if member in self._leaving)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The members that have come and have no job."""
        return tuple(sorted(self._come))

    @property
    def awaited(self) -> str:
        """What the waiting members wait for, in words."""
        if self.is_running:
            n_ranks = len(self.holders)
            return f"job {self.number}, of {n_ranks} ranks, runs and has let nobody in (State.commit or check)"
        places = self._places()
        absent = [holder.member for holder in self._survivors() if holder.member not in self._come]
        if absent or None in places:
            return self._who_is_missing(absent, places.count(None))
        return f"{len(places) + len(self._joining())} ranks have come, and min_ranks is {self.rules.min_ranks}"

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The waiting members that a running job can let in."""
        places = self._places()
        return tuple(member for member in self.waiting if member in places) + self._joining()

    @property
    def is_calling_back(self) -> bool:
        """Whether members of the last job are awaited that may still train: not all of them need know of its end."""
        return (self.number > 0 and self._began_s is not None and not self.is_running
                and any(holder.member not in self._come for holder in self._survivors()))

    @property
    def is_replacing(self) -> bool:
        """Whether a member that was started for a lost one has yet to come."""
        return any(member not in self._come for member in self._instead.values())

    @property
    def to_replace(self) -> tuple[int, ...]:
        """The lost members for which another is to be started now."""
        if self.rules.lost_worker != "wait" or self.is_over or self.failure is not None:
            return ()
        found = [member for member in self._lost if member not in self._instead and member not in self._leaving]
        return tuple(found[: max(0, self.rules.max_replaced - self.n_replaced)])

    @property
    def due_s(self) -> float:
        """The time at which `decide` has an answer at the latest."""
        if self.is_running or self.is_over or self.failure is not None or self._began_s is None:
            return float("inf")
        return self._began_s + self.rules.within_s

    def decide(self, now_s: float) -> Form | Fail | Exclude | None:
        """Return what is to be done; None: nothing yet. A `Form` is entered here, a `Fail` is final."""
        if self.is_running or self.is_over or self.failure is not None or self._began_s is None:
            return None
        found = self._hopeless() or self._verdict(now_s >= self.due_s)
        if isinstance(found, Fail):
            self.failure = found
        elif isinstance(found, Form):
            self._enter(found)
        return found

    def _hopeless(self) -> Fail | None:
        """Return why no next job can be complete, whoever may still come."""
        if not self._lost:
            return None
        if self.rules.lost_worker == "abort":
            return Fail("PeerLostError", f"{self._losses()}; the policy for lost workers is abort")
        survivors = self._survivors()
        if self.number == 0:  # no member has a state yet
            can_go_on = survivors or (self.rules.lost_worker == "wait" and not self._own_failures >= set(self._lost))
            return None if can_go_on else Fail("PeerLostError", self._losses())
        if not survivors:
            return Fail("PeerLostError", f"no quorum: {self._losses()}: nobody is left who has the state")
        if self._has_begun and all(holder.member in self._come and holder.member not in self._with_state
                                   for holder in survivors):
            return Fail("PeerLostError", f"no quorum: {self._losses()}: the others were not given the state yet")
        if self.rules.goes_on:
            return None
        is_some_left = any(holder.member not in self._leaving for holder in survivors)
        before, after = ({holder.node for holder in holders if not (is_some_left and holder.member in self._leaving)}
                         for holders in (self.holders, survivors))
        if self.rules.lost_worker == "shrink" and 2 * (len(after) + 1) <= len(before) + 1:
            return Fail("PeerLostError", f"no quorum: {self._losses()}; ranks are left on {len(after)} of "
                                         f"{len(before)} nodes, which with the launcher are {len(after) + 1} of "
                                         f"{len(before) + 1} voters, and more than half are needed")
        return None

    def _verdict(self, is_due: bool) -> Form | Fail | Exclude | None:
        places = self._places()
        absent = tuple(holder.member for holder in self._survivors() if holder.member not in self._come)
        open_ranks = 0 if self.rules.goes_on else places.count(None)
        if absent or open_ranks:
            if not is_due:
                return None
            if absent and self.rules.lost_worker != "abort" and self.number:
                return Exclude(absent)
            return Fail("StallError", f"the next job was not complete within {self.rules.within_s:g} s: "
                                      f"{self._who_is_missing(absent, open_ranks)}")
        order = tuple(member for member in places if member is not None) + self._joining()
        if len(order) < max(1, self.rules.min_ranks):
            return Fail("StallError", f"no quorum: {len(order)} ranks have come within {self.rules.within_s:g} s, "
                                      f"min_ranks is {self.rules.min_ranks} ({self._losses()})") if is_due else None
        if self._n_fruitless + self._was_fruitless(order) > MOST_FRUITLESS:
            though = "as workers failed by themselves" if self._lost else "though no worker was lost"
            return Fail("StallError", f"{self._n_fruitless + 1} jobs in a row have failed, the last one number "
                                      f"{self.number}, {though}, and without a commit: " + _listed(
                f"worker {member}: {why}" for member, why in sorted(self._failed.items())))
        return Form(self.number + 1, order, self.departing,
                    max(self._commits_of.get(member, 0) for member in order))

    def _was_fruitless(self, order: Sequence[int]) -> bool:
        """Whether the last job has failed, and the next one, of *order*, would be no better as far as is known."""
        known = {*(holder.member for holder in self.holders), *self._instead.values()}
        has_failed = bool(self._failed) and (self._has_ended_badly or not self.rules.goes_on)
        return (has_failed and self._own_failures >= set(self._lost) and known >= set(order)
                and self._n_commits <= self._n_commits_before)

    def _enter(self, form: Form) -> None:
        self._n_fruitless = self._n_fruitless + 1 if self._was_fruitless(form.members) else 0
        self._n_commits_before = self._n_commits
        self._failed.clear()
        self._has_ended_badly = False
        self._own_failures.clear()
        self.number, self.is_running, self._began_s = form.number, True, None
        self.holders = tuple(RankHolder(member, self._come.pop(member)) for member in form.members)
        for member in form.dismissed:
            self._come.pop(member, None)
            self._with_state.discard(member)
        self._lost.clear()
        self._left.clear()
        self._instead.clear()

    def _places(self) -> list[int | None]:
        """Return the member for each rank that is not given up; None: none has come that could take it."""
        spare = [member for member in self.waiting if not self.holds_rank(member)
                 and member not in self._instead.values()]
        places: list[int | None] = []
        departing = self.departing
        for member, _ in self.holders:
            if member in self._left or member in departing:
                continue
            if member not in self._lost:
                places.append(member)
            elif self.rules.lost_worker == "wait" and member not in self._leaving:
                meant = self._instead.get(member)
                if meant in self._come:
                    places.append(meant)
                else:  # any member that has come will do, if none was started
                    places.append(spare.pop(0) if meant is None and spare else None)
        return places

    def _goes_on(self) -> bool:
        """Whether the job goes on: fewer than half of its living members have come back from it."""
        living = self._survivors()
        return (self.is_running and self.rules.goes_on
                and 2 * sum(holder.member in self._come for holder in living) < len(living))

    def _joining(self) -> tuple[int, ...]:
        """Return the members that get further ranks."""
        taken, departing = self._places(), self.departing
        return tuple(member for member in self.waiting if member not in taken and member not in departing
                     and member not in self._instead.values())[: self._n_open(taken)]

    def _n_open(self, places: Sequence[int | None]) -> int:
        """Return how many newcomers may get further ranks beside *places*; those that are to leave make room."""
        return max(0, self.rules.max_ranks - sum(member not in self._leaving for member in places))

    def _survivors(self) -> list[RankHolder]:
        return [holder for holder in self.holders if holder.member not in {*self._lost, *self._left}]

    def _losses(self) -> str:
        if not self._lost:
            return "none is lost"
        rank_of = {holder.member: rank for rank, holder in enumerate(self.holders)}
        return _listed(f"rank {rank_of[member]} (worker {member}) {how}" for member, how in self._lost.items())

    def _who_is_missing(self, absent: Sequence[int], open_ranks: int) -> str:
        said = []
        if absent:
            said.append(f"{_listed(f'worker {member}' for member in absent)} has not come")
        if open_ranks:
            said.append(f"{open_ranks} of {len(self.holders)} ranks are not taken again ({self._losses()}; "
                        f"{self.n_replaced} replacements were started, {self.rules.max_replaced} may be)")
        return "; ".join(said)


def _listed(texts: Iterable[str]) -> str:
    found = list(texts)
    return ", ".join(found[:_MOST_NAMES]) + (" and others" if len(found) > _MOST_NAMES else "")
