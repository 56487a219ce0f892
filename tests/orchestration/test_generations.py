"""Generations: planned by the scheduler, committed when every node is ready; numbers, and what is retired."""
from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings, strategies as st

from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import CapacityError, ConfigError
from bpsfast.orchestration.job.generations import Generations
from bpsfast.orchestration.messages import Commit, NodeInfo, TensorSpec


def generations(n=2, k=1, pages=(4096,), room=-1, **fields):
    nodes = [NodeInfo(index=i, host="a", pid=1, address="", shm_name="", ranks=(i,) if i < n else (),
                      nic_rate_bytes=0.0, page_nbytes=pages[i % len(pages)], room_nbytes=room if i >= n else -1)
             for i in range(n + k)]
    return Generations(nodes, **{"policy": "optimal", "partition_nbytes": 4096, "fusion_nbytes": 4096, **fields})


def spec(name, n_pages=1, **fields):
    return TensorSpec(**{"name": name, "dtype": "uint8", "shape": (n_pages * 4096,), "priority": 0, **fields})


def commit(ours, *specs):
    plan = ours.propose(specs)
    commits = [ours.ready(node, plan.generation) for node in range(3)]
    assert commits[:2] == [None, None]
    return plan, commits[2]


def test_owners_continue_from_what_is_owned():
    ours = generations()
    first, order = commit(ours, spec("a", 2))
    assert [part.owner for unit in first.units for part in unit.parts] == [0, 1]
    assert order == Commit(generation=1, order=(0, 1))
    second, order = commit(ours, spec("b", 2, priority=5))
    assert [part.owner for unit in second.units for part in unit.parts] == [0, 2]
    assert order == Commit(generation=2, order=(2, 3, 0, 1))


@pytest.mark.parametrize(("pages", "stride"), [((4096,), 5 * 4096), ((4096, 65536), 65536)])
def test_partitions_are_cut_at_the_largest_page_of_any_machine(pages, stride):
    ours = generations(pages=pages, partition_nbytes=20 * 1024)
    (unit,) = ours.propose([spec("a", 50)]).units
    assert unit.stride == stride
    assert len({part.owner for part in unit.parts}) == 3
    assert all(part.offset % max(pages) == 0 for part in unit.parts), "or a view of several owners' results cannot be"


def test_a_tensor_without_bytes_is_committed_too():
    ours = generations()
    plan, order = commit(ours, spec("empty", 0))
    assert plan.units[0].parts == () and order.order == ()


def test_late_and_early_words_are_ignored():
    ours = generations()
    assert ours.ready(0, 1) is None and ours.abandon(1) == []
    commit(ours, spec("a"))
    assert ours.ready(0, 1) is None and ours.abandon(1) == []
    ours.propose([spec("b")])
    assert ours.ready(0, 1) is None and ours.abandon(1) == []
    assert ours.not_ready("b") == [0, 1, 2] and ours.not_ready("a") == []


def test_an_abandoned_generation_leaves_nothing_but_used_numbers():
    ours = generations()
    ours.propose([spec("a", 3)])
    ours.ready(0, 1)
    assert ours.abandon(1) == ["a"] and ours.abandon(1) == []
    assert ours.ready(1, 1) is None and ours.not_ready("a") == []
    plan, order = commit(ours, spec("b"))
    assert (plan.generation, plan.units[0].unit, plan.units[0].parts[0].part) == (2, 1, 3)
    assert plan.units[0].parts[0].owner == 0  # nothing is owned yet
    assert order.order == (1, 2, 3, 0)


def test_a_plan_that_cannot_be_made_begins_nothing():
    ours = generations()
    with pytest.raises(CapacityError, match="65537 partitions"):
        ours.propose([spec("a", 65537)])
    assert ours.in_flight is None and ours.number == 0
    commit(ours, spec("b"))


def owned(plans, n_nodes):
    pages = [0] * n_nodes
    for part in (part for plan in plans for unit in plan.units for part in unit.parts):
        pages[part.owner] += part.nbytes // 4096
    return pages


def test_a_helper_owns_what_its_memory_holds_and_the_remark_says_what_that_costs():
    # a partition of one page takes n slots and two results: 6 pages; one page is kept for a ragged end
    ours = generations(n=4, k=4, room=6 * 4096 * 3)
    plan = ours.propose([spec("a", 400)])
    assert owned([plan], 8)[4:] == [2, 2, 2, 2]
    assert "helper 0" in plan.remark and "BPSFAST_MAX_BYTES" in plan.remark
    assert generations(n=4, k=4).propose([spec("a", 400)]).remark == ""


def test_what_a_node_says_is_left_counts_for_the_next_generation():
    ours = generations(n=4, k=1, room=6 * 4096 * 11)
    first = ours.propose([spec("a", 80)])
    assert owned([first], 5)[4] == 10
    for node in range(5):
        ours.can_own(node, 4096 * 5 if node == 4 else -1)
        ours.ready(node, 1)
    second = ours.propose([spec("b", 80)])
    assert owned([second], 5)[4] == 4


def test_hash_placement_uses_byteps_keys():
    plan, _ = commit(generations(policy="hash:naive"), spec("a", 3), spec("b", 2))
    # ((unit + index) * 9973) mod 3 with the helper as server 0
    servers = [(unit.unit + i) * 9973 % 3 for unit in plan.units for i in range(len(unit.parts))]
    assert [part.owner for unit in plan.units for part in unit.parts] == [{0: 2, 1: 0, 2: 1}[s] for s in servers]


def test_a_policy_that_cannot_place_is_refused_at_once():
    with pytest.raises(ConfigError, match="has none"):
        generations(k=0, policy="ps")


def test_numbers_of_retired_partitions_are_used_again():
    ours = generations()
    first, _ = commit(ours, spec("a", 3), spec("b", 2))
    commit(ours, spec("c"))
    numbers = {unit.members[0].name: unit.unit for unit in ours.units}
    assert ours.retire(0, [numbers["a"]], 2) == ([], []) and ours.is_retiring(0, [spec("a")])
    assert not ours.is_retiring(1, [spec("a")]) and not ours.is_retiring(0, [spec("b")])
    over, unknown = ours.retire(1, [numbers["a"]], 2)
    assert [unit.members[0].name for unit in over] == ["a"] and not unknown
    assert ours.retire(1, [numbers["a"]], 2) == ([], [numbers["a"]]), "it is retired already"
    plan, order = commit(ours, spec("d", 2), spec("e"))
    used = [part.part for unit in plan.units for part in unit.parts]
    retired = [part.part for unit in first.units if unit.members[0].name == "a" for part in unit.parts]
    assert used == retired, "those of a, and no new ones"
    assert sorted(order.order) == list(range(6)) and {unit.unit for unit in plan.units} == {3, 4}
    plan, _ = commit(ours, spec("f"))
    assert [part.part for part in plan.units[0].parts] == [6]


def test_bytes_of_what_is_retired_count_no_more():
    ours = generations()
    first, _ = commit(ours, spec("a", 2))
    owners = [part.owner for part in first.units[0].parts]
    ours.retire(0, [0], 1)
    again, _ = commit(ours, spec("b", 2))
    assert [part.owner for part in again.units[0].parts] == owners


def test_an_edition_is_placed_as_if_the_others_were_not_there():
    ours = generations(n=3, k=0)
    first, _ = commit(ours, spec("a", 4, edition_of="a"))
    commit(ours, spec("other", 1))
    ours.propose([spec("a~1", 4, edition_of="a", partition_nbytes=4096)])
    second = ours.in_flight
    assert [part.owner for part in second.units[0].parts] == [
        part.owner for unit in first.units if unit.name == "a" for part in unit.parts]


def of_machines(ranks_of_nodes, policy="optimal"):
    """Return generations of a job with these ranks on each node; a node without any is a helper."""
    nodes = [NodeInfo(index=i, host="a", pid=1, address="", shm_name="", ranks=ranks, nic_rate_bytes=0.0)
             for i, ranks in enumerate(ranks_of_nodes)]
    return Generations(nodes, policy=policy, partition_nbytes=4096, fusion_nbytes=4096)


def owners(plan):
    return {part.owner for unit in plan.units for part in unit.parts}


@st.composite
def jobs(draw):
    """Draw (ranks of each node, some ranks of the job): nodes with ranks first, then helpers."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [tuple(range(at, at + n)) for at, n in zip(first, sizes)] + [()] * draw(st.integers(0, 3))
    some = draw(st.sets(st.integers(0, sum(sizes) - 1), min_size=1))
    return nodes, tuple(sorted(some))


@settings(max_examples=150, deadline=None)
@given(jobs(), st.sampled_from(["optimal", "hash:naive", "hash:mixed"]), st.integers(1, 40))
def test_what_is_of_some_ranks_is_owned_by_their_nodes_and_helpers(drawn, policy, n_pages):
    nodes, ranks = drawn
    members = {i for i, of in enumerate(nodes) if set(of) & set(ranks)}
    helpers = {i for i, of in enumerate(nodes) if not of}
    assume(policy != "hash:mixed" or len(helpers) <= len(nodes) - len(helpers))
    ours = of_machines(nodes, policy)
    if policy == "hash:mixed" and len(helpers) > len(members) > 1:
        with pytest.raises(ConfigError, match="defined for at most as many helpers"):
            ours.propose([spec("a", n_pages, ranks=ranks)])
        assert ours.in_flight is None
        return
    plan = ours.propose([spec("a", n_pages, ranks=ranks)])
    assert owners(plan) <= members | helpers
    assert {unit.ranks for unit in plan.units} == {ranks} and plan.remark == ""
    if policy == "optimal" and len(members) == 1:
        assert owners(plan) == members, "what is of one machine needs no wire"


def test_bytes_of_some_ranks_count_for_what_comes_after():
    ours = of_machines([(0,), (1,), (2,)])
    first = ours.propose([spec("a", 6, ranks=(0, 1))])
    assert owners(first) == {0, 1}
    for node in range(3):
        ours.ready(node, 1)
    second = ours.propose([spec("b", 6)])
    assert owned([first, second], 3) == [4, 4, 4]


def test_what_is_of_some_ranks_is_retired_once_these_have():
    ours = of_machines([(0,), (1,), (2,)])
    ours.propose([spec("a", 4, ranks=(0, 2)), spec("b", 1, ranks=(0, 2))])
    commits = [ours.ready(node, 1) for node in range(3)]
    assert commits[:2] == [None, None] and commits[2] is not None, "every node says so, whoever pushes it"
    numbers = {unit.name: unit.unit for unit in ours.units}
    assert ours.retire(2, [numbers["a"]], 3) == ([], [])
    assert ours.retire(2, [numbers["a"]], 3) == ([], []), "saying it again counts once"
    over, unknown = ours.retire(0, [numbers["a"], 99], 3)
    assert [unit.name for unit in over] == ["a"] and unknown == [99]
    assert [unit.name for unit in ours.units] == ["b"] and ours.is_retiring(2, [spec("a"), spec("b")]) is False


def choosing(rate, n=2, k=1):
    nodes = [NodeInfo(index=i, host="a", pid=1, address="", shm_name="", ranks=(i,) if i < n else (),
                      nic_rate_bytes=rate, copy_rate_bytes=5e9) for i in range(n + k)]
    return Generations(nodes, policy="optimal", partition_nbytes=1 << 20, fusion_nbytes=4096)


@pytest.mark.parametrize(("rate", "owners"), [(12.5e6, {0, 1}), (50e9, {0, 1, 2})])
def test_a_codec_is_in_the_plan_only_where_it_pays_and_only_then_keeps_helpers_out(rate, owners):
    codec = CodecSpec(kind="topk", k=0.01, error_feedback=True, auto=True)
    ours = choosing(rate, n=2)
    plan = ours.propose([TensorSpec(name="a", dtype="float32", shape=(3 << 20,), priority=0, codec=codec)])
    (unit,) = plan.units
    pays = rate < 1e9
    assert unit.codec == (msgspec.structs.replace(codec, auto=False) if pays else None)
    assert all(bool(part.frame_nbytes) is pays for part in unit.parts)
    assert {part.owner for part in unit.parts} == owners
    assert plan.choice.startswith(f"compression pays for {pays:d} of 1 tensors: ") and not plan.remark


def test_where_nothing_can_be_weighed_the_plan_says_so():
    plan = choosing(0.0).propose([spec("a", codec=CodecSpec(kind="onebit", auto=True), dtype="float32")])
    assert plan.units[0].codec is None and not plan.choice and "BPSFAST_NIC_RATE" in plan.remark
