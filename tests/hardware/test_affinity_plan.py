"""The affinity plan: shares of cores, cores of the node, NUMA nodes of memory; on recorded machines and on any."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from bpsfast.hardware.affinity import locality, plan
from bpsfast.hardware.affinity.plan import AffinityOptions, Cores, CpuAffinity, Rank, plan_node, plan_ranks
from bpsfast.orchestration.errors import ConfigError
from tests.sysfs_trees.machine import Machine

Machines = Callable[[str], Machine]
_NOTHING = AffinityOptions()


def span(*ends: int) -> frozenset[int]:
    """The CPUs from the first to the second end, from the third to the fourth..."""
    return frozenset(cpu for first, last in zip(ends[::2], ends[1::2]) for cpu in range(first, last + 1))


def sockets(*n_cores: int, threads: int = 1) -> Cores:
    """Sockets with so many cores each; second threads are numbered after all first ones."""
    total, nodes, first = sum(n_cores), {}, 0
    for number, n in enumerate(n_cores):
        nodes[number] = tuple(frozenset(cpu + total * thread for thread in range(threads))
                              for cpu in range(first, first + n))
        first += n
    return Cores(nodes)


def ranks(n: int, cpus: frozenset[int], *beside: int | None) -> list[Rank]:
    return [Rank(cpus, beside=beside[index] if index < len(beside) else None) for index in range(n)]


def shares(machine: Cores, n: int, *beside: int | None, wishes: AffinityOptions = _NOTHING,
           taken: frozenset[int] = frozenset()) -> list[frozenset[int]]:
    return [each.cpus for each in plan_ranks(machine, ranks(n, machine.cpus, *beside), wishes, taken)]


# -- recorded machines -------------------------------------------------------------------------------------------------

def test_a_cpu_machine_of_two_sockets(recorded_machine: Machines) -> None:
    machine = recorded_machine("cpu_two_socket").hyperthreads()
    found = plan.read_cores(machine.host.tree)
    assert found.count == 128 and frozenset({3, 131}) in found.nodes[0]
    cards = locality.nics_by_name(machine.host, ["ens7f0"]).nodes
    assert plan_node(found, found.cpus, cards, 2, AffinityOptions()) == CpuAffinity(span(64, 127, 192, 255), 1)
    assert plan_ranks(found, ranks(2, found.cpus), AffinityOptions()) == (
        CpuAffinity(span(0, 63, 128, 191), 0), CpuAffinity(span(64, 127, 192, 255), 1))
    four = plan_ranks(found, ranks(4, found.cpus), AffinityOptions())
    assert four[1] == CpuAffinity(span(32, 63, 160, 191), 0) and four[2] == CpuAffinity(span(64, 95, 192, 223), 1)
    assert plan_ranks(found, ranks(1, found.cpus), AffinityOptions()) == (CpuAffinity(),), "all of it is its own"


def test_ranks_sit_beside_their_gpus(recorded_machine: Machines) -> None:
    machine = recorded_machine("dgx1").hyperthreads()
    found, gpus = plan.read_cores(machine.host.tree), locality.gpu_numa_nodes(machine.host)
    assert gpus == (0, 0, 0, 0, 1, 1, 1, 1)
    affinities = plan_ranks(found, ranks(8, found.cpus, *reversed(gpus)), AffinityOptions())
    assert [each.home for each in affinities] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert affinities[0].cpus == span(20, 24, 60, 64) and affinities[7].cpus == span(15, 19, 55, 59)
    assert [len(each.cpus) for each in affinities] == [10] * 8
    only_one = plan_node(found, found.cpus, locality.nics_by_name(machine.host, ["mlx5_2"]).nodes, 8, AffinityOptions())
    assert only_one == CpuAffinity(span(20, 39, 60, 79), 1)
    nodes = locality.nics_by_name(machine.host, ["mlx5_0", "mlx5_2"]).nodes
    both = plan_node(found, found.cpus, nodes, 8, AffinityOptions())
    assert both == CpuAffinity(), "cards on all sockets: the node may run on all"


def test_where_many_gpus_are_shares_are_smaller_but_not_too_small(recorded_machine: Machines) -> None:
    machine = recorded_machine("asymmetric_3_5").hyperthreads()
    found, gpus = plan.read_cores(machine.host.tree), locality.gpu_numa_nodes(machine.host)
    assert gpus == (0, 0, 0, 1, 1, 1, 1, 1)
    affinities = plan_ranks(found, ranks(8, found.cpus, *gpus), AffinityOptions())
    assert [each.home for each in affinities] == list(gpus)
    assert [len(each.cpus) for each in affinities] == [16] * 3 + [12] * 5
    assert shares(sockets(8, 8), 2, 1, 1) == [span(8, 11), span(12, 15)], "the half that is near"
    assert shares(sockets(4, 4, 4), 3, 2, 2, 2) == [span(8, 11), span(0, 3), span(4, 7)], "a third is too little"
    asked = shares(sockets(8, 8), 2, 1, 1, wishes=AffinityOptions(rank_cores=8))
    assert asked == [span(8, 15), span(0, 7)], "as was asked for"


# -- who is left alone -------------------------------------------------------------------------------------------------

def test_whoever_is_bound_is_left_alone_and_its_memory_is_where_it_is() -> None:
    machine = sockets(4, 4)
    bound = [Rank(span(0, 3)), Rank(span(4, 7))]  # as torchrun, Slurm and mpirun bind
    assert plan_ranks(machine, bound, AffinityOptions()) == (CpuAffinity(home=0), CpuAffinity(home=1))
    one_stays = [Rank(machine.cpus, stays=True), Rank(machine.cpus)]  # OMP_PROC_BIND, BPSFAST_NUMA=0
    assert plan_ranks(machine, one_stays, AffinityOptions()) == (CpuAffinity(), CpuAffinity(span(4, 7), 1))


def test_where_there_is_nothing_to_choose_nobody_is_pinned() -> None:
    assert shares(sockets(8), 2) == [frozenset()] * 2, "one socket"
    assert shares(sockets(2, 2), 5) == [frozenset()] * 5, "fewer cores than ranks"
    machine = sockets(4, 4)
    on_one = plan_ranks(machine, ranks(2, span(0, 3)), AffinityOptions())  # a cpuset of one socket
    assert on_one == (CpuAffinity(home=0), CpuAffinity(home=0))
    assert plan_node(machine, span(0, 3), {1}, 2, AffinityOptions()) == CpuAffinity(home=0), "not beside its card"
    assert plan_node(machine, machine.cpus, set(), 2, AffinityOptions()) == CpuAffinity(), "nobody knows the card"
    left = plan_node(sockets(15, 15), span(0, 14, 15, 15), {1}, 2, AffinityOptions())
    assert left == CpuAffinity(), "a cpuset left one CPU there"
    assert plan_node(sockets(1, 1), span(0, 1), {1}, 2, AffinityOptions()) == CpuAffinity(span(1, 1), 1)


def test_a_share_larger_than_a_node_is_of_neighbours() -> None:
    rows = (10, 32, 12, 32), (32, 10, 32, 12), (12, 32, 10, 32), (32, 12, 32, 10)
    clusters = Cores(sockets(4, 4, 4, 4).nodes, {number: dict(enumerate(row)) for number, row in enumerate(rows)})
    assert shares(clusters, 2) == [span(0, 3, 8, 11), span(4, 7, 12, 15)]
    assert [each.home for each in plan_ranks(clusters, ranks(2, clusters.cpus), AffinityOptions())] == [0, 1]
    assert shares(sockets(10, 10), 3) == [span(0, 5), span(10, 15), span(16, 19)], "as many as BytePS's launcher"


# -- wishes ------------------------------------------------------------------------------------------------------------

def test_wishes_hold_on_one_socket_too() -> None:
    one = sockets(8)
    assert shares(one, 2, wishes=AffinityOptions(rank_cores=2)) == [span(0, 1), span(2, 3)]
    assert shares(one, 2, wishes=AffinityOptions(rank_cores=99)) == [span(0, 3), span(4, 7)], "clamped, as by BytePS"
    assert shares(one, 2, wishes=AffinityOptions(avoid=span(0, 1))) == [span(2, 4), span(5, 7)]
    assert shares(sockets(4, 4), 2, wishes=AffinityOptions(rank_cores=1)) == [span(0, 0), span(4, 4)], "spread"
    limited = shares(one, 1, wishes=AffinityOptions(rank_cpus=(span(2, 12),)))
    assert limited == [span(2, 7)], "never more than it might use"


def test_cores_of_the_node_s_own_are_beside_its_card_and_nobody_else_s() -> None:
    machine = sockets(4, 4, threads=2)
    wishes = AffinityOptions(node_cores=2)
    affinity = plan_node(machine, machine.cpus, {1}, 3, wishes)
    assert affinity == CpuAffinity(span(6, 7, 14, 15), 1, alone=True)
    assert shares(machine, 3, wishes=wishes, taken=affinity.cpus) == [span(0, 1, 8, 9), span(2, 3, 10, 11),
                                                                      span(4, 5, 12, 13)]
    assert plan_node(machine, machine.cpus, {0, 1}, 3, wishes).cpus == span(3, 3, 7, 7, 11, 11, 15, 15)
    assert plan_node(machine, machine.cpus, {1}, 7, wishes).cpus == span(7, 7, 15, 15), "each rank needs one"
    assert not plan_node(machine, machine.cpus, {1}, 8, wishes).alone, "nothing is left: it shares"


def test_wishes_that_cannot_be_granted_are_errors_that_say_why() -> None:
    machine = sockets(4, 4)
    for wishes, n, words in [
            (AffinityOptions(rank_cpus=(span(0, 1),)), 2, "the CPUs of 1 local ranks, but there are 2"),
            (AffinityOptions(rank_cpus=(span(0, 1), span(8, 9))), 2, "CPUs 8-9 to local rank 1, .* but on 0-7"),
            (AffinityOptions(rank_cpus=(span(0, 1),), avoid=span(0, 2)), 1, "CPUs 0-1 to local rank 0, .* but on 3-7")]:
        with pytest.raises(ConfigError, match=words):
            shares(machine, n, wishes=wishes)
    with pytest.raises(ConfigError, match=r"BPSFAST_AVOID_CPUS = 0-9 leaves none of the CPUs .*: 0-7"):
        plan_node(machine, machine.cpus, set(), 1, AffinityOptions(avoid=span(0, 9)))


# -- any machine -------------------------------------------------------------------------------------------------------

@st.composite
def situations(draw: st.DrawFn) -> tuple[Cores, list[Rank], frozenset[int], AffinityOptions]:
    machine = sockets(*draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)), threads=draw(st.integers(1, 2)))
    cpus = frozenset(draw(st.sets(st.sampled_from(sorted(machine.cpus)), min_size=1)))
    n = draw(st.integers(1, 8))
    beside = [draw(st.none() | st.integers(0, 4)) for _ in range(n)]
    wishes = AffinityOptions(rank_cores=draw(st.integers(0, 5)), node_cores=draw(st.integers(0, 5)),
                    avoid=frozenset(draw(st.sets(st.integers(0, 20), max_size=3))))
    return machine, ranks(n, cpus, *beside), cpus, wishes


@given(situations(), st.sets(st.integers(0, 4), max_size=3))
def test_no_cpu_that_is_not_allowed_none_twice_and_shares_add_up(
        situation: tuple[Cores, list[Rank], frozenset[int], AffinityOptions], cards: set[int]) -> None:
    machine, came, cpus, wishes = situation
    if wishes.avoid >= cpus:
        return
    node = plan_node(machine, cpus, cards, len(came), wishes)
    assert node.cpus < cpus and not node.cpus & wishes.avoid
    assert not node.alone or (wishes.node_cores and 0 < machine.within(node.cpus).count <= wishes.node_cores)
    taken = node.cpus if node.alone else frozenset()
    affinities = plan_ranks(machine, came, wishes, taken)
    pinned = [each.cpus for each in affinities if each.cpus]
    assert len(pinned) in (0, len(came))
    assert sum(map(len, pinned)) == len(frozenset().union(*pinned)), "disjoint"
    pool = machine.within(cpus - wishes.avoid - taken)
    n_cores = [sum(1 for core in sorted(pool.within(each).nodes.values(), key=len) for _ in core) for each in pinned]
    share = pool.count // len(came)
    assert sum(n_cores) <= pool.count and all(1 <= n <= min(share, wishes.rank_cores or share) for n in n_cores)
    for each in pinned:
        assert each <= pool.cpus
        assert all(core <= each or not core & each for parts in pool.nodes.values() for core in parts), "whole cores"
    for rank, affinity in zip(came, affinities):
        where = affinity.cpus or rank.cpus
        assert affinity.home is None or machine.cpus_of(affinity.home) & where
