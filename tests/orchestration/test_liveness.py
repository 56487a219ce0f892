"""No deadlock by credit or order: many queues at once, whatever is ready first on each machine and arrives first.

And nothing urgent waits for more of what is less urgent than one credit window.
"""
from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.priority.send_queue import NicQueue, WriteOrder, urgency
from bpsfast.orchestration.priority.turns import Entry, Follower, Leader

#: Down to one byte: less than any partition.
CREDITS = st.one_of(st.just(1), st.integers(1, 120))
SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)


class Write(NamedTuple):
    """One write: `order` is its place, `blocked` counts less urgent bytes that reached its peer since it was put."""

    part: int
    is_result: bool
    order: int
    nbytes: int
    blocked: list[int]


class Machine:
    """One node's queue as its dispatcher drives it, and a second account of what waits and what is under way."""

    def __init__(self, n_machines: int, index: int, credit: int, shares: dict[int, int]) -> None:
        self.credit = credit
        self.order = WriteOrder()
        self.card: NicQueue[Write] = NicQueue(credit)
        peers = [peer for peer in range(n_machines) if peer != index]
        for peer in peers:
            self.card.add(peer, (peer - index) % n_machines)
        self.card.plan({peer: shares[peer] for peer in peers})
        self.waiting: dict[int, list[Write]] = {peer: [] for peer in peers}
        self.flying: dict[int, deque[Write]] = {peer: deque() for peer in peers}

    def put(self, peers: list[int], part: int, is_result: bool, nbytes: int) -> None:
        place = self.order.enter(part << 1 | is_result, part, is_result, self.card.first_order)
        for peer in peers:
            write = Write(part, is_result, place.order, nbytes, [0])
            self.waiting[peer].append(write)
            self.card.put(peer, write, order=place.order, key=place.key, nbytes=nbytes)
        self.pump()

    def pump(self) -> None:
        while (found := self.card.pop()) is not None:
            peer, write = found
            ready = [min(waiting, key=lambda each: each.order) for other, waiting in self.waiting.items()
                     if waiting and self.admits(other)]
            assert urgency(write.order) == min(urgency(each.order) for each in ready), "something urgent was overtaken"
            assert write.order == min(each.order for each in self.waiting[peer])
            self.waiting[peer].remove(write)
            self.flying[peer].append(write)

    def admits(self, peer: int) -> bool:
        head = min(self.waiting[peer], key=lambda each: each.order)
        under_way = sum(write.nbytes for write in self.flying[peer])
        return not self.flying[peer] or under_way + head.nbytes <= self.credit

    def deliver(self, peer: int) -> Write:
        write = self.flying[peer].popleft()
        for other in (*self.waiting[peer], *self.flying[peer]):
            other.blocked[0] += write.nbytes if urgency(write.order) > urgency(other.order) else 0
        self.card.release(peer, write.nbytes)
        self.pump()
        return write


@settings(deadline=None, max_examples=200)
@given(sizes=SIZES, credit=CREDITS, n_workers=st.integers(1, 4), n_helpers=st.integers(0, 2),
       random=st.randoms(use_true_random=False))
def test_pushes_and_pulls_end_in_whatever_order_machines_have_their_gradients(
        sizes: list[int], credit: int, n_workers: int, n_helpers: int, random: Random) -> None:
    n_steps, n_machines = 2, n_workers + n_helpers
    owners = [random.randrange(n_machines) for _ in sizes]
    shares = {peer: random.randint(0, 200) for peer in range(n_machines)}
    machines = [Machine(n_machines, index, credit, shares) for index in range(n_machines)]
    inputs = [0] * len(sizes)
    step = [[0] * len(sizes) for _ in range(n_workers)]  # sums that a worker has of each partition
    gradients = [random.sample(range(len(sizes)), len(sizes)) for _ in range(n_workers)]

    def arrived(part: int) -> None:
        inputs[part] += 1
        if inputs[part] == n_workers:
            inputs[part] = 0
            owner = owners[part]
            machines[owner].put([worker for worker in range(n_workers) if worker != owner], part, True, sizes[part])
            if owner < n_workers:
                summed(owner, part)

    def summed(worker: int, part: int) -> None:
        step[worker][part] += 1
        if step[worker][part] < n_steps:  # the next step's gradient comes whenever it likes
            gradients[worker].insert(random.randint(0, len(gradients[worker])), part)

    while True:
        can = [("gradient", worker, 0) for worker in range(n_workers) if gradients[worker]]
        can += [("arrival", index, peer) for index, machine in enumerate(machines)
                for peer, flying in machine.flying.items() if flying]
        if not can:
            break
        what, who, peer = random.choice(can)
        if what == "gradient":
            part = gradients[who].pop()
            if who == owners[part]:
                arrived(part)
            else:
                machines[who].put([owners[part]], part, False, sizes[part])
        else:
            write = machines[who].deliver(peer)
            assert write.blocked[0] <= max(credit, *sizes), "more than a window of what is less urgent came before it"
            if write.is_result:
                summed(peer, write.part)
            else:
                arrived(write.part)
    assert step == [[n_steps] * len(sizes)] * n_workers, "nothing more can happen, and sums are missing"
    assert not any(machine.card.queued or machine.card.in_flight_nbytes for machine in machines)


@settings(deadline=None, max_examples=200)
@given(sizes=SIZES, credit=CREDITS, n_ranks=st.integers(1, 4), random=st.randoms(use_true_random=False))
def test_all_reduces_end_in_whatever_order_ranks_have_their_gradients(sizes: list[int], credit: int, n_ranks: int,
                                                                     random: Random) -> None:
    entries = [Entry(name=f"w{i}", part=0, nbytes=nbytes, kind="float32 sum") for i, nbytes in enumerate(sizes)]
    priority = {entry.key: random.randint(-3, 3) for entry in entries}
    leader, followers = Leader(credit), [Follower() for _ in range(n_ranks - 1)]
    gradients = [random.sample(entries, len(entries)) for _ in range(n_ranks)]
    under_way: list[Entry] = []
    begun: list[set[str]] = [set() for _ in range(n_ranks)]
    blocked: dict[str, int] = {}  # less urgent bytes done since rank 0 was given it; while it waits there
    ended: list[Entry] = []

    def turn() -> None:
        turns = leader.turns()
        under_way.extend(turns)
        begun[0].update(entry.name for entry in turns)
        for entry in turns:
            assert blocked.pop(entry.name) <= max(credit, *sizes), "it waited for more than a window"
            assert all(priority[entry.key] >= priority[name, 0] for name in blocked), "something urgent was overtaken"
        for follower in followers:
            follower.tell(turns)
        for rank, follower in enumerate(followers, 1):
            begun[rank].update(entry.name for entry in follower.turns())

    while True:
        can: list[tuple[int, Entry | None]] = [(rank, None) for rank in range(n_ranks) if gradients[rank]]
        can += [(-1, entry) for entry in under_way if all(entry.name in names for names in begun)]
        if not can:
            break
        rank, done = random.choice(can)
        if done is not None:
            under_way.remove(done)
            ended.append(done)
            for role in (leader, *followers):
                role.done(done)
            for name in blocked:
                blocked[name] += done.nbytes if priority[done.key] < priority[name, 0] else 0
        elif rank == 0:
            entry = gradients[0].pop()
            blocked[entry.name] = 0
            leader.give(entry, priority[entry.key])
        else:
            followers[rank - 1].give(gradients[rank].pop())
        turn()
    assert sorted(ended, key=lambda entry: entry.name) == entries, "nothing more can happen, and sums are missing"
