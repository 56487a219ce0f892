"""Tests the workers of an elastic job: which ones it can lose, and which are started, on which node."""
from __future__ import annotations

import types

import pytest

from bpsfast.launch.elastic_service import ReplaceWorker, StartWorkers, WorkerPool, member_of, worker
from bpsfast.launch.processes import Command, Kind


class Heard:
    """Keeps what a `ElasticService` is told."""

    def __init__(self):
        self.facts, self.is_over, self.holders, self.left_behind = [], False, {0, 1}, set()

    def was_left_behind(self, member):
        return member in self.left_behind

    def holds_rank(self, member):
        return member in self.holders

    def __getattr__(self, name):
        return lambda *arguments: self.facts.append((name, *arguments))


def worker_pool_of(nodes, goes_on=True):
    commands = [worker(i, Command("", Kind.RANK, ("true",), {"BPSFAST_NODE_ID": node, "X": "y"}))
                for i, node in enumerate(nodes)]
    heard = Heard()
    return WorkerPool(heard, commands, goes_on), commands, heard.facts


def ended(command, code, is_lost=False):
    return types.SimpleNamespace(command=command, code=code, is_lost=is_lost, end_in_words=lambda: f"ended by {code}")


def launched(worker_pool, order):
    """What the pool starts for *order*."""
    worker_pool.take(order)
    found = worker_pool.launches()
    assert worker_pool.launches() == [] and all(host is None for _, host in found)
    return [command for command, _ in found]


def test_a_command_says_whose_it_is():
    _, commands, _ = worker_pool_of("ab")
    assert [(command.name, member_of(command)) for command in commands] == [("worker 0", 0), ("worker 1", 1)]
    assert commands[1].environ == {"BPSFAST_NODE_ID": "b", "X": "y", "BPSFAST_MEMBER": "1"}


@pytest.mark.parametrize(("code", "goes_on", "expected", "fact"), [
    (-9, True, True, ("ended", 1, "ended by -9", False)), (-9, False, False, ("give_up", "worker 1 ended by -9")),
    (1, True, True, ("ended", 1, "ended by 1", True)), (1, False, False, ("give_up", "worker 1 ended by 1")),
    (0, True, True, ("left", 1)), (0, False, True, ("left", 1)), (137, True, True, ("ended", 1, "ended by 137", False)),
    (143, True, True, ("ended", 1, "ended by 143", False)), (137, False, False, ("give_up", "worker 1 ended by 137")),
    (128, True, True, ("ended", 1, "ended by 128", True)), (255, True, True, ("ended", 1, "ended by 255", True))])
def test_a_worker_that_is_killed_or_fails_is_lost(code, goes_on, expected, fact):
    worker_pool, commands, facts = worker_pool_of("ab", goes_on)
    assert worker_pool.has_ended(ended(commands[1], code)) is expected and facts == [fact]


def test_a_worker_that_is_lost_with_its_host_did_not_fail_by_itself():
    worker_pool, commands, facts = worker_pool_of("ab")
    assert worker_pool.has_ended(ended(commands[1], 255, is_lost=True))
    assert facts == [("ended", 1, "ended by 255", False)]


def test_who_is_killed_after_the_training_has_failed():
    worker_pool, commands, facts = worker_pool_of("ab")
    worker_pool._service.is_over = True
    assert not worker_pool.has_ended(ended(commands[1], -9)) and facts == [("give_up", "worker 1 ended by -9")]


def test_who_was_left_behind_by_its_job_fails_nothing_after_the_training():
    worker_pool, commands, facts = worker_pool_of("ab")
    worker_pool._service.is_over, worker_pool._service.left_behind = True, {1}
    assert worker_pool.is_superfluous(ended(commands[1], None))
    assert worker_pool.has_ended(ended(commands[1], -9)) and facts == [("left", 1)]


@pytest.mark.parametrize("code", [-9, -15, 1])
def test_who_had_no_part_in_the_last_job_fails_nothing_after_it(code):
    worker_pool, _, facts = worker_pool_of("ab")
    (command,) = launched(worker_pool, StartWorkers(1))
    late = ended(command, code)
    assert not worker_pool.is_superfluous(late)
    worker_pool._service.is_over = True
    assert worker_pool.is_superfluous(late) and not worker_pool.is_superfluous(ended(worker(0, command), code))
    assert worker_pool.has_ended(late) and facts[-1] == ("left", 2)


@pytest.mark.parametrize("code", [-9, 1])
@pytest.mark.parametrize("goes_on", [False, True])
def test_who_has_yet_to_come_is_as_any_other_before_the_end(code, goes_on):
    worker_pool, _, facts = worker_pool_of("ab", goes_on)
    (command,) = launched(worker_pool, StartWorkers(1))
    assert worker_pool.has_ended(ended(command, code)) is goes_on
    assert facts[-1][0] == ("ended" if goes_on else "give_up")


def test_a_lost_workers_node_gets_another_one():
    worker_pool, commands, facts = worker_pool_of("aab")
    worker_pool.has_ended(ended(commands[1], -9))
    (command,) = launched(worker_pool, ReplaceWorker(1))
    assert (command.name, command.environ["BPSFAST_NODE_ID"], facts[-1]) == ("worker 3", "a", ("started", 3, 1, True))
    (again,) = launched(worker_pool, ReplaceWorker(3))
    assert (again.name, again.environ["BPSFAST_NODE_ID"], facts[-1]) == ("worker 4", "a", ("started", 4, 3, True))


def test_more_workers_are_started_where_fewest_are():
    worker_pool, _, facts = worker_pool_of("aab")
    found = launched(worker_pool, StartWorkers(3))
    assert [command.environ["BPSFAST_NODE_ID"] for command in found] == ["b", "a", "b"]
    assert facts == [("started", member, None, True) for member in (3, 4, 5)]
