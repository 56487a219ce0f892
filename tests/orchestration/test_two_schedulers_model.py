"""Several schedulers run at the same time, and nodes change between them at any moment: at most one rules the job.

The decisions and the control logs are the real ones. A node talks to one scheduler at a time. When it changes, what was
under way to and from the one before is lost, and that one notices late, or never. Nodes call each other lost without a
reason, die, and fall silent for a scheduler.

What must hold: the sets of nodes that commits go to are a chain, each of which contains the next, except those all of
whose nodes have died. So two schedulers never go on with parts of the job that do not contain each other. And if
nothing more happens, the nodes that remain are led by one scheduler, which commits a new tensor.
"""
from __future__ import annotations

from collections import defaultdict, deque
from random import Random

import pytest

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from bpsfast.orchestration.failover.state_merge import NodeReports
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.job.node_losses import NodeLosses
from bpsfast.orchestration.roster import is_majority
from tests.support.job_table import join, spec

#: A round that all nodes have completed: nothing is trained here.
ROUND = 5


class Node:
    """A node with one rank; it answers what the scheduler asks."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.log = ControlLog("1.0", {"transport": "tcp"})
        self.at = 0  # its scheduler
        self.n_connections = 1
        self.up: deque[m.Message] = deque()
        self.is_alive = True
        self.has_rejoined = True

    @property
    def connection(self) -> bytes:
        return m.connection_id(f"node {self.index}", self.n_connections)

    def say(self, message: m.Message) -> None:
        self.log.said(message)
        self.up.append(message)

    def hear(self, message: m.Message) -> None:
        self.log.heard(message)
        match message:
            case m.Plan() | m.Recover():
                self.say(m.Ready(generation=message.generation))
            case m.Freeze():
                parts = [part.part for unit in self.log.units for part in unit.parts]
                self.say(m.FreezeReport(epoch=message.epoch, progress=tuple(
                    (part, ROUND, ROUND, self.index) for part in parts)))
            case m.RejoinRequest():
                self.up.extend(self.log.report(message.number))
            case m.Resume():
                self.has_rejoined = True
            case m.Abort() | m.Refuse():
                self.is_alive = False


class World:
    """One job of *n_nodes*, and *n_schedulers* at different addresses; the job starts at the first."""

    def __init__(self, n_nodes: int, n_schedulers: int, is_replaced: bool = False) -> None:
        self.now = 0.0
        self.states = [SchedulerState(JobSettings(num_nodes=n_nodes, min_workers=1, has_others=True, name=f"job {i}",
                                                  is_replaced=is_replaced), 0.0) for i in range(n_schedulers)]
        self.down: dict[bytes, deque[m.Message]] = defaultdict(deque)
        self.nodes = [Node(index) for index in range(n_nodes)]
        self.unnoticed: list[tuple[int, bytes]] = []  # closed connections, of which a scheduler does not know
        self.committed: list[tuple[int, frozenset[int]]] = []  # by whom, for which nodes
        for node in self.nodes:
            self.post(0, self.states[0].receive(0.0, node.connection, join(f"h{node.index}", pid=node.index)))
        self.declare("first")
        self.settle()
        assert len(self.committed) == 1

    def declare(self, name: str) -> None:
        for node in self.nodes:
            if node.is_alive:
                node.say(m.Declare(rank=node.index, tensors=(spec(name),)))

    # -- what happens -----------------------------------------------------------------------------------------

    def post(self, number: int, outgoing: m.Outgoing, was_rebuilding: bool = False) -> None:
        job = self.states[number].job
        if not was_rebuilding and any(isinstance(message, m.Commit) for _, message in outgoing):
            self.committed.append((number, frozenset(job.roster.workers)))
            self.require_chain()
        for sender, message in outgoing:
            self.down[sender].append(message)

    def require_chain(self) -> None:
        last = self.committed[-1][1]
        for _, nodes in self.committed:
            assert nodes <= last or last <= nodes or not any(self.nodes[index].is_alive for index in nodes), (
                f"two parts of one job: {self.committed}")

    def give(self, number: int, sender: bytes, message: m.Message) -> None:
        state = self.states[number]
        was_rebuilding = state._rebuilding is not None
        self.post(number, state.receive(self.now, sender, message), was_rebuilding)

    def send_up(self, node: Node) -> None:
        """The scheduler of *node* reads its next message."""
        if node.up and node.is_alive:
            self.give(node.at, node.connection, node.up.popleft())

    def send_down(self, node: Node) -> None:
        """*node* reads its next message."""
        if self.down[node.connection] and node.is_alive:
            node.hear(self.down[node.connection].popleft())

    def move(self, node: Node, number: int) -> None:
        """*node* changes to scheduler *number*, or dials its own anew."""
        if node.is_alive:
            self.unnoticed.append((node.at, node.connection))
            node.at, node.has_rejoined = number, False
            node.n_connections += 1
            node.up = deque(node.log.report())

    def notice(self, random: Random) -> None:
        """A scheduler notices the end of some connection."""
        if self.unnoticed:
            number, sender = self.unnoticed.pop(random.randrange(len(self.unnoticed)))
            self.post(number, self.states[number].unreachable(self.now, sender))

    def accuse(self, node: Node, other: Node) -> None:
        if node is not other and node.is_alive:
            node.say(m.Lost(who=f"node {other.index}", reason="its connection has ended"))

    def die(self, node: Node) -> None:
        if node.is_alive and sum(each.is_alive for each in self.nodes) > 1:
            node.is_alive = False
            self.unnoticed.append((node.at, node.connection))

    def prove(self, node: Node, dead: Node) -> None:
        """*node* finds that the port of *dead* refuses connections, for long enough."""
        if node.is_alive and not dead.is_alive:
            for _ in range(4):
                node.up.append(m.ProbeResult(node=dead.index, outcome="refused"))
                while node.up:
                    self.send_up(node)
                self.tick(0.4)

    def beat(self, nodes: list[Node]) -> None:
        """The schedulers of *nodes* hear them; others may be cut off."""
        for node in nodes:
            if node.is_alive:
                self.give(node.at, node.connection, m.Heartbeat(sequence=1))

    def tick(self, dt: float) -> None:
        self.now += dt
        for number, state in enumerate(self.states):
            was_rebuilding = state._rebuilding is not None
            self.post(number, state.tick(self.now), was_rebuilding)

    def settle(self, of: list[Node] | None = None) -> None:
        """Everything under way from and to nodes *of* arrives."""
        nodes = self.nodes if of is None else of
        while any(node.is_alive and (node.up or self.down[node.connection]) for node in nodes):
            for node in nodes:
                self.send_up(node)
                self.send_down(node)

    def pass_time(self, heard: list[Node], answering: list[Node]) -> None:
        """A lease passes, in which schedulers hear only nodes *heard*; of these some are *answering*."""
        for _ in range(12):
            self.beat(heard)
            self.settle([node for node in answering if node in heard])
            self.tick(1.0)

    def members(self) -> list[Node]:
        """The nodes alive that belong to the last committed set, except those that one of these nodes calls lost."""
        alive = [node for node in self.nodes if node.is_alive]
        _, lost = max((node.log.settled for node in alive), default=(0, ()))
        members = [node for node in alive if node.index not in lost]
        dropped = {index for node in members for index in node.log.lost}
        return [node for node in members if node.index not in dropped]

    def step(self, random: Random) -> None:
        node, other = random.choice(self.nodes), random.choice(self.nodes)
        some = random.sample(self.nodes, random.randint(0, len(self.nodes)))
        match random.randrange(10):
            case 0 | 1:
                number = random.randrange(len(self.states))
                for each in some:
                    self.move(each, number)
            case 2 | 3:
                self.accuse(node, other)
                while node.up and node.is_alive:
                    self.send_up(node)
                self.tick(0.6)
            case 4:
                self.pass_time(some, random.sample(self.nodes, random.randint(0, len(self.nodes))))
            case 5:
                self.settle(some)
            case 6 if random.random() < 0.2:
                self.die(node)
            case 6:
                self.prove(node, other)
            case 7:
                self.notice(random)
            case 8 if random.random() < 0.3:
                self.declare(f"t{random.randrange(1 << 30)}")
            case _:
                for _ in range(random.randint(1, 8)):
                    each = random.choice(self.nodes)
                    random.choice([self.send_up, self.send_down])(each)


def walk(seed: int, n_steps: int = 40) -> World:
    random = Random(seed)
    world = World(random.choice([2, 3, 3, 4, 5]), random.choice([2, 2, 3]))
    for _ in range(n_steps):
        world.step(random)
    return world


@pytest.mark.parametrize("begin", range(0, 600, 60))
def test_at_most_one_scheduler_rules_whatever_happens(begin):
    for seed in range(begin, begin + 60):
        walk(seed)


@pytest.mark.parametrize("begin", range(0, 200, 50))
def test_the_nodes_that_remain_go_on_under_one_scheduler(begin):
    """All come to one that has just been started: it leads them, if they are a majority of the last committed ones."""
    n_led = 0
    for seed in range(begin, begin + 50):
        world = walk(seed, 20)
        last = min((nodes for _, nodes in world.committed), key=len)
        world.states.append(SchedulerState(world.states[0]._settings, world.now))
        expected = world.members()
        for node in Random(seed).sample(world.nodes, len(world.nodes)):
            world.move(node, len(world.states) - 1)
            world.settle([node])
        if is_majority([node.index for node in expected], last):
            # Later it may judge between nodes that call each other lost.
            assert all(node.is_alive for node in expected), (
                f"seed {seed}: of {[node.index for node in expected]} some were told to end: {world.committed}")
        for _ in range(30):
            world.settle()
            world.beat(world.nodes)
            world.tick(1.0)
        n_before = len(world.committed)
        world.declare("last")
        world.settle()
        left = world.members()
        mine = [nodes for number, nodes in world.committed[n_before:] if number == len(world.states) - 1]
        if is_majority([node.index for node in left], last) and world.states[-1].job.aborted is None:
            assert mine, f"seed {seed}: nobody leads nodes {[node.index for node in left]} of {world.committed}"
        if mine:
            n_led += 1
            units = [node.log.units for node in left]
            assert all(each == units[0] for each in units), f"seed {seed}: they have committed different tensors"
            assert "last" in {member.name for unit in units[0] for member in unit.members}
    assert n_led > 25, "else it says little"


def old_majority(self, but):
    """Of the nodes that are not lost, though their loss may not be committed."""
    workers = self._roster.workers
    return is_majority([index for index in workers if self._roster.senders[index] not in but], workers)


def old_voters(self):
    return frozenset(self.workers)


@pytest.mark.parametrize(("where", "name", "change"), [
    (NodeLosses, "has_majority", old_majority), (NodeReports, "voters", property(old_voters))],
    ids=["ruling", "taking over"])
def test_a_majority_of_another_set_of_nodes_would_not_do(where, name, change, monkeypatch):
    monkeypatch.setattr(where, name, change)
    for seed in range(3000):
        try:
            walk(seed)
        except AssertionError as exc:
            assert "two parts of one job" in str(exc)
            return
    pytest.fail("nothing has noticed it")


def with_two_dropped(n_schedulers: int) -> World:
    """Five nodes, two of which follow scheduler 1; scheduler 0 has dropped these, and has not committed that."""
    world = World(5, n_schedulers)
    first, second, third, fourth, last = world.nodes
    for each in (third, fourth):
        world.move(each, 1)
    for _ in range(11):
        world.beat([first, second, last])
        world.tick(1.0)
        world.send_up(first)
    assert world.states[0].job.roster.lost == {2, 3}
    return world


def test_a_node_that_was_left_out_does_not_decide_who_goes_on():
    """The first node has read that two others are lost, and these go on without it, under a scheduler that is lost."""
    world = with_two_dropped(3)
    first, second, third, fourth, _ = world.nodes
    while world.down[first.connection]:
        world.send_down(first)
    assert first.log.lost == {2, 3} and not second.log.lost and len(world.committed) == 1
    world.move(second, 1)
    for _ in range(30):
        world.beat([second, third, fourth])
        world.settle([second, third, fourth])
        world.tick(1.0)
    assert world.committed[-1] == (1, {1, 2, 3})
    for each in (first, second, third, fourth):
        world.move(each, 2)
        world.settle([each])
    for _ in range(30):
        world.beat(world.nodes)
        world.settle([first, second, third, fourth])
        world.tick(1.0)
    assert [node.is_alive for node in (first, second, third, fourth)] == [False, True, True, True]
    world.declare("last")
    world.settle([second, third, fourth])
    assert world.committed[-1] == (2, {1, 2, 3})


def test_a_scheduler_does_not_refuse_nodes_that_have_gone_on_without_it():
    """The first one has dropped two nodes, and does not know that another one was left to these by a third."""
    world = with_two_dropped(2)
    first, second, third, fourth, last = world.nodes
    world.move(second, 1)
    for _ in range(30):
        world.beat([first, second, third, fourth, last])
        world.settle([second, third, fourth])
        world.tick(1.0)
    assert world.committed[-1] == (1, {1, 2, 3})
    for each in (third, fourth, second):
        world.move(each, 0)
        world.settle([each])
    for _ in range(30):
        world.beat(world.nodes)
        world.settle()
        world.tick(1.0)
    assert [node.is_alive for node in world.nodes] == [False, True, True, True, False]
    world.declare("last")
    world.settle()
    assert world.committed[-1] == (0, {1, 2, 3})


def test_nodes_that_call_each_other_lost_are_no_majority_together():
    """A scheduler with three of five, one of which has read that the others are lost, can never decide, and says so."""
    world = World(5, 2)
    first, _, third, fourth, _ = world.nodes
    while world.states[0].job.roster.lost != {2, 3}:
        world.beat([node for node in world.nodes if node not in (third, fourth)])
        world.tick(1.0)
    while world.down[first.connection]:
        world.send_down(first)
    assert first.log.lost == {2, 3}
    for each in (first, third, fourth):
        world.move(each, 1)
    world.settle([first, third, fourth])
    world.tick(1.0)
    beats = [message for node in (first, third, fourth) for message in world.down[node.connection]
             if isinstance(message, m.Heartbeat)]
    assert len(beats) == 3 and all(beat.is_short for beat in beats)
    while not world.states[1].has_given_up:
        world.beat([first, third, fourth])
        world.settle([first, third, fourth])
        world.tick(1.0)
    assert all(node.is_alive for node in world.nodes), "another scheduler may hear a majority"


def test_two_parts_of_a_network():
    """The first node and its scheduler lose the others one by one; these go on under another scheduler."""
    world = World(3, 2)
    first, *others = world.nodes
    world.accuse(first, others[1])
    world.send_up(first)
    world.tick(0.6)
    assert world.states[0].job.roster.lost == {2}, "two of three are a majority"
    world.move(others[0], 1)
    world.move(others[1], 1)
    world.accuse(first, others[0])
    for _ in range(30):
        world.beat(world.nodes)
        world.settle()
        world.tick(1.0)
    assert world.states[0].job.aborted is None and world.states[0]._rebuilding is not None, "it decides nothing"
    assert [nodes for number, nodes in world.committed if number == 0] == [{0, 1, 2}]
    assert world.committed[-1] == (1, {1, 2})


def test_a_scheduler_without_a_majority_says_so_and_ends_without_a_last_word():
    world = World(3, 2)
    for node in world.nodes[1:]:
        world.move(node, 1)
    for _ in range(100):
        world.beat(world.nodes[:1])
        world.settle()
        world.tick(1.0)
        if world.states[0].has_given_up:
            break
    said = list(world.down[world.nodes[0].connection])
    assert world.states[0].has_given_up and world.nodes[0].is_alive
    assert not any(isinstance(message, m.Abort) for message in said)
    world.move(world.nodes[0], 0)
    world.send_up(world.nodes[0])
    assert not world.down[world.nodes[0].connection], "it says nothing more"


def test_a_scheduler_that_nodes_visit_in_vain_again_and_again_ends_as_soon_as_one_where_they_stay():
    """It leaves the job to the next scheduler, and its nodes do not search for longer than `start_timeout_s`."""
    world = World(3, 2, is_replaced=True)
    last = world.nodes[2]
    world.tick(20.0)
    for _ in range(5):
        assert not world.states[1].has_given_up
        world.move(last, 1)
        for _ in range(4):
            world.beat(world.nodes)
            world.settle()
            world.tick(1.0)
        world.move(last, 0)
        (sender,) = [sender for number, sender in world.unnoticed if number == 1]
        world.unnoticed.clear()
        world.states[1].unreachable(world.now, sender)
        for _ in range(3):
            world.tick(1.0)
    assert world.states[1].has_given_up and last.is_alive


def test_a_scheduler_that_nodes_have_visited_in_vain_takes_another_job():
    world = World(3, 2, is_replaced=True)
    state = world.states[1]
    world.move(world.nodes[2], 1)
    world.settle()
    state.unreachable(0.0, world.nodes[2].connection)
    world.tick(1.0)
    for index in range(2):
        state.receive(1.0, b"new %d" % index, join(f"n{index}", pid=index))
    for now in range(2, 58):
        for index in range(2):
            state.receive(float(now), b"new %d" % index, m.Heartbeat(sequence=now))
        state.tick(float(now))
    assert not state.has_given_up


def test_the_last_scheduler_tells_its_nodes_why_it_ends():
    """No other one is started after it."""
    world = World(3, 2)
    last = world.nodes[2]
    world.states[1] = SchedulerState(JobSettings(num_nodes=3, min_workers=1, has_others=True, is_last=True), 0.0)
    world.move(last, 1)
    for _ in range(59):
        world.beat(world.nodes)
        world.settle()
        world.tick(1.0)
    assert world.states[1].job.aborted is None
    world.tick(1.0)
    (told,) = [message for message in world.down[last.connection] if isinstance(message, m.Abort)]
    assert told.error == "StallError" and "has not heard a majority of the nodes with ranks for 60 s" in told.reason
    assert not world.states[1].has_given_up
