"""Stores with backups in a real engine: which pushes a version is made of, and that nobody ever sees half of one.

Each push adds 12 in an element of its worker's own, so that the elements of version v add up to 12 v, whoever is in it.
"""
from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.pyx.port import TIMED_OUT
from tests.support.engine_node import N
from tests.support.store_owner import MOST, Owner


@pytest.fixture
def owner():
    made = Owner()
    yield made
    made.engine_node.close()


def begin(owner, n, backups):
    """Open a store of zeros for *n* workers."""
    owner.open(n, backups=backups)
    for worker in range(1, n):
        owner.push(worker)
    assert (owner.push_pull(0, 0.0) == 0.0).all()
    for worker in range(1, n):
        assert (owner.answer(worker) == 0.0).all()


def push(owner, worker):
    change = np.zeros(N, np.float32)
    change[worker] = 12.0
    owner.push(worker, change)


def elements(answer, n):
    """Return what was counted of each worker."""
    assert not answer[n:].any()
    return tuple(answer[:n].tolist())


def test_a_version_is_the_mean_of_what_came_first_and_answers_it(owner):
    begin(owner, 3, backups=1)
    push(owner, 2)
    assert owner.engine_node.ports[2].wait(2, 1, 2, 0.1) == TIMED_OUT, "one of two that it takes"
    assert sorted(owner.engine_node.engine.behind(2)) == [0, 1]
    push(owner, 0)
    assert elements(owner.answer(0), 3) == elements(owner.answer(2), 3) == (6, 0, 6)


def test_a_push_that_comes_too_late_is_left_out_and_answered_at_once(owner):
    begin(owner, 3, backups=1)
    for _ in range(3):
        push(owner, 0)
        push(owner, 1)
        owner.answer(0)
        owner.answer(1)
    push(owner, 2)  # computed on the first version; there were three since
    assert elements(owner.answer(2), 3) == (18, 18, 0)
    assert owner.engine_node.engine.counters()["left_out"] == 1
    push(owner, 2)  # and now it has the newest one
    push(owner, 1)
    assert elements(owner.answer(1), 3) == elements(owner.answer(2), 3) == (18, 24, 6)
    last = {source: n_last for source, _, _, _, _, n_last, _ in owner.engine_node.engine.lags(True)}
    assert last == {0: 0, 1: 0, 2: 1}, "who was late is counted as the last one"


def test_without_backups_all_are_waited_for(owner):
    begin(owner, 3, backups=0)
    for step in range(1, 4):
        for worker in (2, 0, 1):
            push(owner, worker)
        for worker in range(3):
            assert elements(owner.answer(worker), 3) == (4 * step,) * 3
    assert owner.engine_node.engine.counters()["left_out"] == 0


def test_who_pushes_nothing_has_the_newest_version_at_once(owner):
    begin(owner, 3, backups=1)
    push(owner, 0)
    owner.push(1)
    assert elements(owner.answer(1), 3) == (0, 0, 0)
    push(owner, 1)
    assert elements(owner.answer(0), 3) == (6, 6, 0)
    assert owner.engine_node.engine.counters()["left_out"] == 0


def test_who_leaves_is_not_waited_for(owner):
    begin(owner, 4, backups=1)
    push(owner, 0)
    push(owner, 1)
    assert owner.engine_node.ports[0].wait(0, 1, 2, 0.1) == TIMED_OUT
    owner.retire([3])
    assert elements(owner.answer(0), 4) == elements(owner.answer(1), 4) == (6, 6, 0, 0)
    owner.retire([1])
    push(owner, 2)  # late
    assert elements(owner.answer(2), 4) == (6, 6, 0, 0)
    owner.retire([0])
    push(owner, 2)
    assert elements(owner.answer(2), 4) == (6, 6, 12, 0), "the last worker waits for nobody"


def test_several_who_leave_at_once_make_one_version(owner):
    begin(owner, 4, backups=0)
    push(owner, 0)
    push(owner, 1)
    assert owner.engine_node.ports[1].wait(1, 1, 2, 0.1) == TIMED_OUT
    owner.retire([2, 3])
    assert elements(owner.answer(0), 4) == elements(owner.answer(1), 4) == (6, 6, 0, 0)
    push(owner, 0)
    push(owner, 1)
    assert elements(owner.answer(0), 4) == elements(owner.answer(1), 4) == (12, 12, 0, 0)


def test_a_commit_leaves_a_version_that_waits_as_it_is(owner):
    begin(owner, 2, backups=0)
    push(owner, 0)
    assert owner.engine_node.ports[0].wait(0, 1, 2, 0.1) == TIMED_OUT
    owner.engine_node.own(2, local=[owner.engine_node.ranks[2]])
    owner.engine_node.commit()
    push(owner, 1)
    assert elements(owner.answer(0), 2) == elements(owner.answer(1), 2) == (6, 6)


def test_who_comes_while_a_version_is_about_to_be_made_is_answered_with_it():
    owner = Owner(n_threads=1)
    begin(owner, 4, backups=1)
    push(owner, 2)
    push(owner, 3)
    assert owner.engine_node.ports[3].wait(3, 1, 2, 0.1) == TIMED_OUT
    owner.engine_node.engine.freeze(5)
    owner.retire([1])  # two are enough now
    push(owner, 0)  # more urgent than the part that makes the version
    owner.engine_node.commit()
    for worker in (2, 3, 0):
        assert elements(owner.answer(worker), 4) == (0, 0, 6, 6)
    assert owner.engine_node.engine.counters()["left_out"] == 1
    owner.engine_node.close()


def test_more_backups_than_workers_is_one_push_a_version(owner):
    begin(owner, 2, backups=7)
    push(owner, 0)
    assert elements(owner.answer(0), 2) == (12, 0)
    push(owner, 1)
    assert elements(owner.answer(1), 2) == (12, 0)
    push(owner, 1)
    assert elements(owner.answer(1), 2) == (12, 12)


@pytest.fixture(scope="module")
def owners():
    made = {n_threads: Owner(n_threads) for n_threads in (1, 3)}
    yield made
    for each in made.values():
        each.engine_node.close()


class Model:
    """What the newest version has, who has pushed for the next one, and which version everybody has."""

    def __init__(self, n, backups):
        self.quorum = max(1, n - backups)
        self.version, self.counted = 0, [0.0] * n
        self.taken, self.seen = set(), [0] * n

    def push(self, worker):
        """Return who is answered."""
        if self.seen[worker] < self.version:
            return self._answer({worker})
        self.taken.add(worker)
        if len(self.taken) < self.quorum:
            return set()
        for each in self.taken:
            self.counted[each] += 12.0 / self.quorum
        self.version += 1
        answered, self.taken = self.taken, set()
        return self._answer(answered)

    def _answer(self, workers):
        for each in workers:
            self.seen[each] = self.version
        return workers


@settings(max_examples=3_000, deadline=None)
@given(n=st.integers(1, MOST), backups=st.integers(0, 3), n_threads=st.sampled_from([1, 3]),
       order=st.lists(st.integers(0, MOST - 1), max_size=24))
def test_any_schedule_of_pushes_makes_the_versions_of_the_model(owners, n, backups, n_threads, order):
    owner = owners[n_threads]
    try:
        keep_to(owner, n, backups, order)
    except BaseException:  # the next one begins anew
        owner.engine_node.close()
        owners[n_threads] = Owner(n_threads)
        raise


def keep_to(owner, n, backups, order):
    begin(owner, n, backups)
    model = Model(n, backups)
    for worker in [each % n for each in order] + list(range(n)) * 2:  # at the end everybody has an answer
        if worker in model.taken:
            assert not owner.answered(worker), "too early"
            continue
        push(owner, worker)
        for each in model.push(worker):
            np.testing.assert_allclose(elements(owner.answer(each), n), model.counted, rtol=1e-6)
    for worker in range(n):
        if worker not in model.taken:
            owner.push_pull(worker)
    for worker in sorted(set(range(n)) - model.taken):
        owner.retire([worker])
    for worker in sorted(model.taken):  # with the others gone they are enough
        owner.answer(worker)
    owner.retire(sorted(model.taken))


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_no_answer_is_half_a_version_whoever_pushes_at_the_same_time(owners, backups):
    owner, n_steps = owners[3], 400
    begin(owner, MOST, backups)
    found = [[] for _ in range(MOST)]

    def work(worker):
        for _ in range(n_steps):
            push(owner, worker)
            found[worker].append(elements(owner.answer(worker), MOST))
        owner.engine_node.engine.retire([worker])  # or the others wait for it

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(MOST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    versions = {}
    for answers in found:
        assert len(answers) == n_steps
        numbers = [sum(answer) / 12 for answer in answers]
        assert np.allclose(numbers, np.round(numbers), atol=1e-2) and sorted(numbers) == numbers
        for number, answer in zip(numbers, answers, strict=True):
            assert versions.setdefault(round(number), answer) == answer, "two that have the same version differ"
