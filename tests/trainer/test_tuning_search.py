"""The search on step times that are formulas, with noise: where it ends, and what it never tries."""
from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bpsfast.orchestration.placement.shares import Machine
from bpsfast.trainer.tuning_search import (
    CREDITS,
    FUSIONS,
    PARTITIONS,
    STREAMS,
    WORTHWHILE,
    Search,
    TuningPoint,
    expectation,
)

DEFAULT = TuningPoint(4_096_000, 4_096_000, 16_777_216, 2)


class Bowl:
    """Step times that grow with the squared distance from *centre*, on a floor that no setting changes."""

    def __init__(self, centre, steepness, floor=1.0):
        self.centre, self.steepness, self.floor = centre, steepness, floor

    def __call__(self, point):
        away = sum((a - b) ** 2 * s for a, b, s in zip(point.coordinates, self.centre.coordinates, self.steepness))
        return self.floor + away

    @property
    def best(self):
        return min(self(TuningPoint(p, f, p * c, n))
                   for p in PARTITIONS for f in FUSIONS for c in CREDITS for n in STREAMS)


def searched(bowl, start=DEFAULT, n_trials=14, noise=0.0, seed=1):
    chance, search = random.Random(seed), Search()
    for point in dict.fromkeys((start, DEFAULT)):
        search.tell(point, bowl(point) * math.exp(chance.gauss(0, noise)))
    for _ in range(n_trials - len(search.measured)):
        proposal = search.propose()
        if proposal is None:
            break
        search.tell(proposal[0], bowl(proposal[0]) * math.exp(chance.gauss(0, noise)))
    return search


places = st.builds(lambda p, f, c, n: TuningPoint(PARTITIONS[p], FUSIONS[f], PARTITIONS[p] * CREDITS[c], STREAMS[n]),
                   st.integers(2, 9), st.integers(1, 4), st.integers(0, 5), st.integers(0, 2))
steepness = st.tuples(st.floats(0, 0.05), st.floats(0, 0.01), st.floats(0, 0.02), st.floats(0, 0.1))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(places, steepness, st.sampled_from([PARTITIONS[0], PARTITIONS[-1], 4_096_000]), st.integers(0, 99))
def test_it_ends_near_the_best_of_the_grid(centre, steepness, partition, seed):
    bowl = Bowl(centre, steepness)
    start = TuningPoint(partition, 4_096_000, 16_777_216, 2)
    search = searched(bowl, start, n_trials=8 * len(centre.coordinates), noise=0.005, seed=seed)
    assert bowl(search.best) <= 1.05 * bowl.best


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(places, steepness, st.integers(0, 99))
def test_nothing_takes_twice_the_time_of_the_default(centre, steepness, seed):
    bowl = Bowl(centre, steepness)
    search = searched(bowl, noise=0.02, seed=seed)
    assert max(bowl(point) for point in search.measured) <= 2 * bowl(DEFAULT)


def test_where_nothing_matters_it_soon_stops():
    search = searched(lambda point: 1.0, n_trials=100)
    assert len(search.measured) < 30 and search.propose() is None


def test_what_was_refused_is_not_proposed_again():
    search, bowl = Search(), Bowl(TuningPoint(1_024_000, 4_096_000, 8_192_000, 2), (0.05, 0.01, 0.02, 0.0))
    search.tell(DEFAULT, bowl(DEFAULT))
    refused = set()
    for _ in range(20):
        proposal = search.propose()
        if proposal is None:
            break
        assert proposal[0].layout[:2] not in refused and proposal[1] >= WORTHWHILE
        refused.add(proposal[0].layout[:2])
        search.refuse(proposal[0])
    assert len(refused) >= 3


def test_a_model_leads_the_way():
    """Where writes are dear the first proposal after the default has fewer of them."""
    known = [Machine(True, 12.5e9), Machine(True, 12.5e9)]
    search = Search(expectation(known, [100_000] * 2000))
    start = TuningPoint(64_000, 64_000, 16_777_216, 2)
    search.tell(start, 1.0)
    first, _ = search.propose()
    assert first.partition_nbytes > start.partition_nbytes or first.fusion_nbytes > start.fusion_nbytes


@pytest.mark.parametrize("machines", [[Machine(True), Machine(True)], [Machine(True, 1e9)]])
def test_of_unknown_rates_nothing_is_expected(machines):
    expected = expectation(machines, [10**6, 10**8])
    assert expected(DEFAULT) == expected(TuningPoint(64_000, 64_000, 64_000, 1)) == 1.0


def test_large_partitions_cost_their_ends_and_small_ones_their_writes():
    expected = expectation([Machine(True, 1.25e9), Machine(True, 1.25e9)], [10**8] * 4)
    best = min(PARTITIONS, key=lambda nbytes: expected(TuningPoint(nbytes, 4_096_000, 16_777_216, 2)))
    assert PARTITIONS[0] < best < PARTITIONS[-1]
