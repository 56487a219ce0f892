"""Ranks are lost at any moment, alone or with their machine, and the job goes on without them (`min_workers`).

As in `test_recovery_model` the decisions are the scheduler's own, nodes do as the engine does, helpers die and come,
and what is under way comes late. What a rank may read is the sum of the ranks that its node has named, the same one on
all nodes; a result that a remaining rank has seen complete stays; and the remaining ranks complete all rounds.
"""
from __future__ import annotations

from random import Random
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from bpsfast.orchestration import long_lists, messages as m
from tests.orchestration.test_lost_scheduler_model import Orphans
from tests.orchestration.test_recovery_model import APART, IN_VAIN, TOGETHER, World
from tests.support.job_table import spec
from tests.support.lossy_nodes import ROUNDS, ModelNode, after

SHAPES = [*APART, [("a", 2), ("b", 2), ("h", 0)], [("a", 3), ("b", 1), ("c", 1), ("h", 0)], [("a", 2), ("b", 1)],
          [("a", 1), ("b", 1), ("c", 1)], *TOGETHER, [("a", 2), ("a", 2), ("b", 1), ("c", 0)]]


class WorkerLosses(World):
    """A world that goes on without ranks. Units: "w" of all ranks, "x" of some, "s" of some, whose partitions are
    pushed one by one.
    """

    names = "wxs"
    declared = len(names)
    fields = MappingProxyType({"min_workers": 1})

    @initialize(shape=st.sampled_from(SHAPES), policy=st.sampled_from(["optimal", "ps"]),
                first_round=st.sampled_from([0, ROUNDS - 3]))
    def start(self, shape, policy, first_round):
        self.dead, self.doomed = set(), set()  # ranks: those that do nothing more; those that are or will be lost
        self.seen = {}  # (unit, partitions that are pushed together, round) -> rank -> ranks that its result is of
        policy = policy if any(n == 0 for _, n in shape) else "optimal"
        super().start(shape, policy, first_round)

    def ranks_of(self, unit):
        if unit == "w":
            return self.ranks
        return [rank for rank in self.ranks if (rank % 2 == 0 if unit == "x" else rank % 3 != 1)]

    @property
    def workers(self):
        return [node for node in self.nodes if node.ranks]

    @property
    def lost_ranks(self):
        """The ranks that the scheduler calls lost, or one before it has."""
        return self.job.roster.lost_ranks.union(*(node.lost_ranks for node in self.nodes))

    def living(self, node):
        return [rank for rank in node.ranks if rank not in self.dead] if node.alive else []

    def end_process(self, index):
        super().end_process(index)
        self.dead.update(self.nodes[index].ranks)
        self.doomed.update(self.nodes[index].ranks)

    def require_sum(self, number, unit, round_, total):
        ranks = [rank for rank, _ in total]
        assert all(each == round_ for _, each in total), f"partition {number}, round {round_}: {total}"
        assert len(set(ranks)) == len(ranks) and set(ranks) <= set(self.ranks_of(unit)), (number, round_, total)

    def streams(self, node):
        """Return (unit, partitions that are pushed together) of all that *node* knows."""
        return [(unit, each) for unit, parts in node.units.items()
                for each in ([(part,) for part in parts] if unit == "s" else [tuple(parts)])]

    # -- what can happen next -------------------------------------------------------------------------------

    def possible(self):
        looks = [(node.index, node.look) for node in self.nodes if node.alive and node.is_waiting
                 and any(self.wires[index, node.index, part] and self.near(index, node.index)
                         for index, part, _ in node.superseded)]
        judges = [(-1, self.judge)] if getattr(self.job, "_losses", None) and self.job._losses._accused else []
        return super().possible() + looks + judges

    def judge(self):
        """The scheduler decides which of two nodes goes that do not reach each other."""
        for sender, error in self.job._losses.judged(self.table.now + 1.0, lambda sender: 0.0):
            self.table.post(self.job._lose(self.table.now, sender, error))

    def pushes(self, node):
        return [(node.index, self.push, rank, unit, parts) for unit, parts in self.streams(node)
                for rank in self.living(node) if rank in self.ranks_of(unit)
                if self.may_push(node, rank, unit, parts)]

    def may_push(self, node, rank, unit, parts=()):
        round_ = self.pushed.get((rank, unit, parts), self.first_round)
        return (round_ != after(self.first_round, self.limit)
                and all(node.board[part] == round_ for part in parts))

    def push(self, rank, unit, parts=()):
        node = self.home[rank]
        self.results_stay(rank, unit, parts)
        round_ = after(self.pushed.get((rank, unit, parts), self.first_round))
        self.pushed[rank, unit, parts] = round_
        for part in parts:
            self.memory["input", rank, part] = ((rank, round_),)
            if rank not in node.lost_ranks:
                node.lanes[rank].append((part, round_))

    # -- rules ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.declared < len(self.names))
    @rule()
    def declare(self):
        name = self.names[self.declared]
        self.declared += 1
        for node in self.workers:
            for rank in self.living(node):
                if rank in self.ranks_of(name):
                    ranks = () if name == "w" else tuple(self.ranks_of(name))
                    self.tell(node.index, m.Declare(rank=rank, tensors=(
                        spec(name, shape=(4096 if name == "w" else 2048,), ranks=ranks, separate=name == "s"),)))

    def candidates(self):
        """The ranks that may be lost: one is left."""
        left = [rank for rank in self.ranks if rank not in self.doomed]
        return left if len(left) > 1 else []

    @rule(number=st.integers(0, 5), n_unsaid=st.integers(0, 4))
    def lose_rank(self, number, n_unsaid):
        """A rank dies, and has not announced the last *n_unsaid* partitions that it was to push."""
        left = self.candidates()
        if not left:
            return
        rank = left[number % len(left)]
        node = self.home[rank]
        self.dead.add(rank)
        self.doomed.add(rank)
        for _ in range(min(n_unsaid, len(node.lanes[rank]))):
            node.lanes[rank].pop()
        self.tell(node.index, m.Lost(who=f"rank {rank}", reason="its process has ended"))

    @rule(number=st.integers(0, 2), at_once=st.booleans())
    def lose_node(self, number, at_once):
        """A node dies, and its ranks with it."""
        node = self.workers[number % len(self.workers)]
        if node.alive and set(self.candidates()) - set(node.ranks):
            self.end_process(node.index)
            if at_once:
                self.notice()

    @rule(number=st.integers(0, 2), who=st.integers(0, 2))
    def lose_sight_of_worker(self, number, who):
        """One node with ranks does not reach another one any more, and says so."""
        lost, worker = self.workers[number % len(self.workers)], self.workers[who % len(self.workers)]
        if (lost.index not in worker.excluded and lost is not worker and worker.alive and lost.alive
                and not self.near(lost.index, worker.index)
                and set(self.candidates()) - {*lost.ranks, *worker.ranks}
                and not self.doomed.intersection(worker.ranks)):
            self.doomed.update(lost.ranks, worker.ranks)  # one of the two
            self.cut(worker.index, lost.index)
            self.tell(worker.index, m.Lost(who=f"node {lost.index}", reason="its connection has ended"))

    @rule(number=st.integers(0, 4), who=st.integers(0, 2))
    def lose_sight(self, number, who):
        worker = self.workers[who % len(self.workers)].index
        if not any(not node.ranks for node in self.nodes):
            return
        lost = self.helper(number)
        if self.nodes[worker].alive and lost not in self.nodes[worker].excluded:
            self.cut(worker, lost)
            self.tell(worker, m.Lost(who=f"node {lost}", reason="its connection has ended"))

    @rule(number=st.integers(0, 4), at_once=st.booleans())
    def die(self, number, at_once):
        if any(not node.ranks for node in self.nodes):
            super().die(number, at_once)

    @rule(other=st.integers(0, 2), one=st.none() | st.integers(0, 5))
    def hold_up(self, other, one):
        worker = self.workers[other % len(self.workers)].index
        self.slow |= {(index, worker) for index in range(len(self.nodes)) if one is None or index == one}

    @precondition(lambda self: len(self.nodes) < 8)
    @rule(host=st.sampled_from("abxy"), seed=st.integers(0, 1 << 30), n_steps=st.integers(0, 150))
    def come(self, host, seed, n_steps):
        super().come(host, seed, n_steps)

    # -- what holds -----------------------------------------------------------------------------------------

    def results_stay(self, rank, unit, parts=()):
        """What a rank may read is the sum of the right ranks: the last complete round, and the one before until it
        pushes again."""
        node = self.home[rank]
        if (rank, unit, parts) not in self.pushed or rank in self.dead or rank in self.lost_ranks:
            return
        last = self.pushed[rank, unit, parts]
        for round_ in [after(last, -1)] + [last] * all(node.board[part] == last for part in parts):
            if round_ != self.first_round:
                self.result_is_right(node, rank, unit, parts, round_)

    def result_is_right(self, node, rank, unit, parts, round_):
        found = {self.memory["result", node.parts[part].place, part, round_ & 1] for part in parts}
        assert len(found) == 1, f"rank {rank} reads a part of the sums of {unit}, round {round_}, each: {found}"
        (total,) = found
        self.require_sum(parts, unit, round_, total)
        ranks = {each for each, _ in total}
        assert ranks >= set(self.ranks_of(unit)) - self.lost_ranks, f"{unit}, round {round_}: {ranks}"
        if unit != "s":
            lost = next(lost for first, lost in reversed(node.lost_from[unit])
                        if (round_ - first) % ROUNDS < ROUNDS // 2)
            assert ranks == set(self.ranks_of(unit)) - lost, f"{unit}, round {round_} is the sum of {ranks}"
        seen = self.seen.setdefault((unit, parts, round_), {})
        seen[rank] = ranks
        for other, theirs in seen.items():
            if other not in self.dead and other not in self.lost_ranks:
                assert theirs == ranks, f"{unit}, round {round_}: rank {other} has seen {theirs}, rank {rank} {ranks}"
        assert self.seen.get((unit, parts, after(round_, -1)), {}).get(rank, ranks) >= ranks, "nobody comes back"

    @invariant()
    def all_results_stay(self):
        for rank, unit, parts in getattr(self, "pushed", ()):
            self.results_stay(rank, unit, parts)

    def all_is_done(self):
        last, roster = after(self.first_round, self.limit), self.job.roster
        left = [rank for node in self.workers for rank in self.living(node)]
        assert left == roster.ranks and left, (left, roster.ranks)
        for node in self.workers:
            for unit, parts in self.streams(node):
                for rank in set(self.living(node)).intersection(self.ranks_of(unit)):
                    waits = [part for part in parts if node.board[part] != last]
                    assert not waits, f"rank {rank} waits for partitions {waits} of {unit!r} for ever"
                    assert self.pushed[rank, unit, parts] == last
        missing = [(rank, unit) for rank in left for unit in self.names
                   if rank in self.ranks_of(unit) and unit not in self.home[rank].units]
        assert not missing, f"never committed: {missing}"

    @invariant()
    def the_job_goes_on(self):
        aborted = self.job.aborted if hasattr(self, "table") else None
        if aborted is not None:
            assert len(set(self.hosts)) < len(self.hosts), aborted
            assert any(words in aborted.reason for words in IN_VAIN), aborted


# -- what walks have found, in a few steps --------------------------------------------------------------------------


def world_of(shape, policy="ps", names="wxs"):
    """Return a world in which units *names* are declared, and nothing has happened."""
    world = WorkerLosses()
    world.names = names
    world.start(shape, policy, 0)
    for _ in world.names[1:]:
        world.declare()
    return world


def owners(world, unit):
    return {part.part: part.owner for each in world.job._generations.units if each.name == unit for part in each.parts}


def commit_all(world):
    """Go on until all units are committed, before anything is pushed."""
    world.limit = 0
    world.go_on(Random(1))
    world.limit = 2


def end(world):
    world.release()
    world.teardown()
    assert not world.table.job.over


def test_a_node_has_a_round_whole_that_nobody_else_has_and_loses_its_only_rank_of_the_unit():
    """It has passed on the next one already."""
    world = world_of([("a", 2), ("b", 1), ("h", 0)], names="wx")
    commit_all(world)
    world.hold_up(other=1, one=None)
    world.go_on(Random(1))
    assert world.nodes[0].parts[min(owners(world, "x"))].round == 2
    world.lose_rank(number=0, n_unsaid=0)
    world.go_on(Random(1))
    end(world)


@pytest.mark.parametrize("unit", "xs")
def test_a_partial_of_a_node_that_leaves_a_unit_is_under_way(unit):
    world = world_of([("a", 2), ("b", 1), ("h", 0)], names="w" + unit)
    commit_all(world)
    world.slow = {(0, 2)}
    world.go_on(Random(1), without=1)
    world.lose_rank(number=0, n_unsaid=0)
    world.go_on(Random(1))
    end(world)


def test_a_result_for_a_node_that_leaves_a_unit_comes_from_a_keeper():
    """Its owner was lost before, so the new one never had it to send."""
    world = world_of([("a", 1), ("b", 2), ("c", 1), ("h", 0), ("i", 0), ("j", 0)])
    commit_all(world)
    world.limit = 1
    world.slow = {(index, 1) for index in range(6)}
    world.go_on(Random(1))
    world.end_process(next(iter(owners(world, "x").values())))
    world.notice()
    world.go_on(Random(1))
    assert any(1 in each.lacking for each in world.job._generations.changes.values())
    world.lose_rank(number=2, n_unsaid=0)
    world.go_on(Random(1))
    end(world)


@pytest.mark.parametrize("with_owner", [False, True])
@pytest.mark.parametrize("keeper", [0, 2])
def test_a_keeper_is_lost_before_its_result_arrives(keeper, with_owner):
    """And the new owner never had it to send; *with_owner*: and is lost as well."""
    world = world_of([("a", 1), ("b", 2), ("c", 1), ("h", 0), ("i", 0), ("j", 0)])
    commit_all(world)
    world.limit = 1
    world.slow = {(index, 1) for index in range(6)}
    world.go_on(Random(1))
    world.die(number=0, at_once=True)
    world.go_on(Random(1))
    assert any(1 in each.lacking for each in world.job._generations.changes.values())
    if with_owner:
        world.die(number=1, at_once=True)
    world.end_process(keeper)
    world.notice()
    world.go_on(Random(1))
    end(world)


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_an_owner_sums_a_round_again_that_its_predecessor_has_summed(joined, lacks):
    """It has no inputs of that round. *joined*: the predecessor lives; *lacks*: a node lacks the result, and awaits it
    from another one than the owner."""
    world = world_of([("a", 2), ("b", 1), ("c", 1), ("h", 0), ("i", 0)])
    commit_all(world)
    world.slow = {(index, 4) for index in range(3)}  # what helper 1 sums is not complete
    if lacks:
        world.slow |= {(index, 1) for index in range(5)}
    world.go_on(Random(1))
    assert 3 in owners(world, "w").values() and 4 in owners(world, "w").values()
    if joined:
        world.slow -= {(index, 4) for index in range(3)}
        world.slow |= {(4, index) for index in range(3)}
        world.come(host="x", seed=1, n_steps=10_000)
    else:
        world.die(number=0, at_once=True)
        world.go_on(Random(1))
    world.lose_rank(number=1, n_unsaid=0)
    world.go_on(Random(1))
    end(world)


def test_a_result_that_was_lent_is_summed_again_and_its_owner_is_lost():
    """What the keeper has sent was dropped: a node that lacks the new result has to get it."""
    world = world_of([("a", 2), ("b", 1), ("c", 1), ("h", 0), ("i", 0)])
    commit_all(world)
    world.slow = {(index, node) for index in range(5) for node in (1, 4)}
    world.go_on(Random(1))
    world.die(number=0, at_once=True)
    world.go_on(Random(1))
    assert any(1 in each.lacking for each in world.job._generations.changes.values())
    world.lose_rank(number=1, n_unsaid=0)
    world.go_on(Random(1))
    world.release()
    for _ in range(1000):
        if world.job._losses.recovery is not None:
            world.go_on(Random(1), n_steps=1)
    world.slow = {(index, 1) for index in range(5)}
    world.go_on(Random(1))
    world.die(number=1, at_once=True)
    world.go_on(Random(1))
    end(world)


def test_all_ranks_of_a_unit_are_lost_and_a_helper_comes():
    world = world_of([("a", 2), ("b", 2), ("h", 0)])
    world.all_steps(seed=1, without=-2)
    world.lose_rank(number=0, n_unsaid=0)
    world.lose_rank(number=1, n_unsaid=0)
    world.go_on(Random(1))
    assert world.job.roster.ranks == [1, 3], "nobody pushes x"
    world.come(host="x", seed=1, n_steps=10_000)
    end(world)


@pytest.mark.parametrize("unit", "xs")
@pytest.mark.parametrize("slow", [(2, 0), (0, 2)])
def test_all_ranks_of_a_unit_are_lost_and_something_of_it_is_under_way(slow, unit):
    """*slow*: to one of their nodes, or to the owner."""
    world = world_of([("a", 2), ("b", 2), ("h", 0)], names="w" + unit)
    commit_all(world)
    world.slow = {slow}
    world.go_on(Random(1))
    world.lose_rank(number=0, n_unsaid=0)
    world.lose_rank(number=1, n_unsaid=0)
    if unit == "s":  # of ranks 0, 2 and 3, the last of which takes its node along
        world.lose_rank(number=1, n_unsaid=0)
    world.go_on(Random(1))
    end(world)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_leaves_a_unit_shares_memory_with_an_owner(seed):
    world = world_of([("a", 2), ("a", 2), ("b", 1), ("a", 0)], "optimal")
    world.all_steps(seed=seed, without=-2)
    world.lose_rank(number=seed % 3, n_unsaid=0)
    world.go_on(Random(seed))
    end(world)


# -- at random ------------------------------------------------------------------------------------------------------


TestWorkerLosses = WorkerLosses.TestCase
TestWorkerLosses.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_a_keeper_is_lost_whose_result_is_summed_again():
    """What it was to send does not come, and the owner, which has taken the partition over, never had to send it."""
    world = WorkerLosses()
    world.start(shape=APART[0], policy="optimal", first_round=0)
    world.hold_up(other=0, one=None)
    world.come(host="a", n_steps=71, seed=0)
    world.declare()
    world.die(number=0, at_once=False)
    world.hold_up(other=0, one=0)
    world.notice()
    world.some_steps(n_steps=32, seed=1, without=2)
    world.declare()
    world.lose_rank(number=1, n_unsaid=0)
    world.all_steps(seed=0, without=0)
    world.come(host="a", n_steps=0, seed=0)
    world.teardown()
    assert not world.table.job.over


class LosingOrphans(WorkerLosses, Orphans):
    """A world that loses ranks and schedulers."""

    names = "wx"
    declared = len(names)

    @initialize(shape=st.sampled_from(SHAPES), policy=st.sampled_from(["optimal", "ps"]),
                first_round=st.sampled_from([0, ROUNDS - 3]))
    def start(self, shape, policy, first_round):
        super().start(shape, policy, first_round)

    @precondition(lambda self: not self.table.job.over and self.table.job._rebuilding is None and (
        0 < len(self.job.roster.nodes) < 8))
    @rule(host=st.sampled_from("abxy"), seed=st.integers(0, 1 << 30), n_steps=st.integers(0, 150))
    def come(self, host, seed, n_steps):
        Orphans.come(self, host, seed, n_steps)

    @rule(number=st.integers(0, 4), who=st.integers(0, 2))
    def lose_sight(self, number, who):
        worker = self.workers[who % len(self.workers)].index
        if (any(not node.ranks for node in self.nodes)
                and self.helper(number) < len(next(self.control_log(worker).report()).nodes)):
            super().lose_sight(number, who)

    @invariant()
    def the_job_goes_on(self):
        """It ends if a scheduler that takes over hears no majority: another one may hear the others."""
        aborted = self.job.aborted if hasattr(self, "table") else None
        if aborted is None or "too few nodes have told it" not in aborted.reason:
            super().the_job_goes_on()

    def teardown(self):
        long_lists.MOST_INLINE = getattr(self, "before", long_lists.MOST_INLINE)
        if not hasattr(self, "limit"):
            return
        self.slow.clear()  # what is under way has to arrive before nodes are ready
        for _ in range(5):  # for longer than a scheduler that takes over waits
            self.unnoticed.update(index for index, node in enumerate(self.nodes) if not node.alive)
            if not self.table.job.over:
                self.notice()
                self.go_on(Random(self.limit))
        assert self.table.job.over or self.table.job._rebuilding is None
        World.teardown(self)  # not that of `Orphans`, which expects all ranks at the end


TestLosingOrphans = LosingOrphans.TestCase
TestLosingOrphans.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def walk(seed, node_type=ModelNode, n_steps=12):
    """Do a few things at random; raise `AssertionError` if something does not hold."""
    random = Random(seed)
    world = type("Walk", (WorkerLosses,), {"node_type": node_type})()
    world.start(random.choice(SHAPES), random.choice(["optimal", "ps"]), random.choice([0, ROUNDS - 3]))
    world.declare()
    world.declare()
    rules = [lambda: world.some_steps(random.getrandbits(30), random.randint(1, 60), -2),
             lambda: world.some_steps(random.getrandbits(30), random.randint(1, 60), random.randint(-2, 5)),
             lambda: world.all_steps(random.getrandbits(30), random.randint(-2, 5)),
             lambda: world.hold_up(random.randint(0, 2), random.choice([None, 0, 1, 2, 3])), world.release,
             lambda: world.lose_rank(random.randint(0, 5), random.randint(0, 4)),
             lambda: world.lose_rank(random.randint(0, 5), random.randint(0, 4)),
             lambda: world.lose_node(random.randint(0, 2), random.random() < 0.5), world.notice,
             lambda: world.lose_sight_of_worker(random.randint(0, 2), random.randint(0, 2)),
             lambda: world.lose_sight(random.randint(0, 4), random.randint(0, 2)),
             lambda: world.die(random.randint(0, 4), random.random() < 0.5),
             lambda: len(world.nodes) < 8 and world.come(random.choice("abxy"), random.getrandbits(30),
                                                         random.randint(0, 150)),
             lambda: world.declared < len(world.names) and world.declare()]
    for _ in range(n_steps):
        if world.table.job.over:
            break
        random.choice(rules)()
        world.all_results_stay()
        world.the_job_goes_on()
    world.teardown()


class KeepsWords(ModelNode):
    """The words of a round that is summed again do not go back."""

    def redo(self, number, kept, sums_again):
        before = self.board[number]
        super().redo(number, kept, sums_again)
        self.board[number] = before


class TakesSuperseded(ModelNode):
    """What is superseded is expected again, and not dropped."""

    def drop_early(self, node, number, round_):
        pass


class DoesNotAwaitSuperseded(ModelNode):
    """What is superseded may arrive after the commit."""

    def redone_arrived(self):
        return True


class KeepsLostInputs(ModelNode):
    """The input of a lost rank that has arrived stays."""

    def leave(self, number, part):
        sources, arrived, last = list(part.sources), dict(part.arrived), dict(part.last)
        is_left = super().leave(number, part)
        if is_left:
            lost = [source for source in sources if source in arrived or source in last]
            part.sources, part.arrived, part.last = [
                source for source in sources if source in part.sources or source in lost], arrived, last
        return is_left


class SumsNothingAgain(ModelNode):
    """Partials with a lost rank's input count."""

    def on_recover(self, message):
        super().on_recover(msgspec.structs.replace(message, redone=tuple(
            msgspec.structs.replace(redo, again=()) for redo in message.redone)))


class AwaitsNothingAgain(ModelNode):
    """An owner takes the partial that came for the one that is to come."""

    def await_again(self, number, node):
        pass


class BeginsLate(ModelNode):
    """Ranks are told one round too many with lost ones."""

    def on_recover(self, message):
        super().on_recover(msgspec.structs.replace(message, begins=tuple(
            (unit, after(first)) for unit, first in message.begins)))


@pytest.mark.parametrize("node_type", [KeepsWords, TakesSuperseded, DoesNotAwaitSuperseded, KeepsLostInputs,
                                       SumsNothingAgain, AwaitsNothingAgain, BeginsLate])
def test_a_node_that_forgets_one_of_its_duties_is_noticed(node_type):
    walk(0)
    for seed in range(400):
        try:
            walk(seed, node_type)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{node_type.__doc__} Nothing has noticed it")
