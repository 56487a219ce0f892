"""Which ranks sum a partition, and who copies it: every strategy, every partition."""
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.collectives.island_routes import IslandRoutes, PartitionRoute, Route, routes_of
from bpsfast.hardware.topology.strategy_solver import Strategy, choose
from tests.support.gpu_machines import dgx1, switched

RANKS = {f"gpu{i}": 10 + i for i in range(8)}


def test_the_paper_pcie_machine_reduces_below_switches_and_mixes_a_fifth_of_plain_copies() -> None:
    found = routes_of(choose(switched(wire_rate=1e15)), RANKS)
    assert found.islands() == [(10, 11, 12, 13), (14, 15, 16, 17)]
    chunks = [found.partition_route(part, 15) for part in range(10_000)]
    alone = [partition_route for partition_route in chunks if partition_route == PartitionRoute((15,), 15)]
    assert len(alone) / len(chunks) == pytest.approx(0.2, abs=0.005)
    roots = Counter(partition_route.root for partition_route in chunks if len(partition_route.island) > 1)
    assert all(n / 8000 == pytest.approx(0.25, abs=0.01) for n in roots.values()) and len(roots) == 4


def test_with_nvlink_no_root_is_below_the_cards_switch() -> None:
    found = routes_of(choose(dgx1()), RANKS)
    assert found.islands() == [tuple(range(10, 18))]
    assert not {10, 11} & {found.partition_route(part, 10).root for part in range(100)}


def test_gpus_without_a_rank_are_nobodys_root() -> None:
    found = routes_of(choose(switched((4,))), {"gpu1": 1, "gpu3": 3})
    assert all(found.partition_route(part, rank).root in (1, 3) for part in range(50) for rank in (1, 3))


@st.composite
def some_routes(draw: st.DrawFn) -> IslandRoutes:
    ranks = list(range(draw(st.integers(1, 6))))
    routes = []
    shares = draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3))
    for share in shares:
        order = draw(st.permutations(ranks))
        cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), max_size=3)) | {len(ranks)})
        islands = tuple(tuple(sorted(order[begin:end])) for begin, end in zip([0, *cuts], cuts) if begin < end)
        roots = tuple(tuple((rank, 1 / len(island)) for rank in island) for island in islands)
        routes.append(Route(share / sum(shares), islands, roots))
    return IslandRoutes(tuple(routes))


@given(some_routes(), st.integers(0, 1 << 31))
def test_members_of_an_island_say_the_same_of_it_and_one_of_them_is_the_root(found: IslandRoutes, part: int) -> None:
    ranks = {rank for island in found.routes[0].islands for rank in island}
    chunks = {rank: found.partition_route(part, rank) for rank in ranks}
    for rank, partition_route in chunks.items():
        assert rank in partition_route.island and partition_route.root in partition_route.island
        assert all(chunks[other] == partition_route for other in partition_route.island)


@settings(max_examples=30)
@given(some_routes(), st.integers(0, 10_000))
def test_shares_are_what_partitions_get_whatever_numbers_they_have(found: IslandRoutes, first: int) -> None:
    counts = Counter(found.partition_route(part, 0).island for part in range(first, first + 1000))
    wanted: Counter[tuple[int, ...]] = Counter()
    for route in found.routes:
        for island in route.islands:
            if 0 in island:
                wanted[island] += route.share * 1000
    for island, n in counts.items():
        assert n == pytest.approx(wanted[island], abs=25)


def test_a_rank_in_no_island_goes_alone() -> None:
    assert IslandRoutes((Route(1.0, ((1, 2),), (((1, 1.0),),)),)).partition_route(3, 0) == PartitionRoute((0,), 0)
    assert routes_of(Strategy((), choose(switched((2,))).loads), RANKS).islands() == []
