"""Stores before anything is kept: what is refused, who may own them, and the units of their workers."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import CapacityError, ConfigError, UnsupportedError
from bpsfast.orchestration.job.declarations import Declarations
from bpsfast.orchestration.job.generations import Generations
from bpsfast.orchestration.messages import NodeInfo, TensorSpec
from bpsfast.orchestration.placement.partition import check_store
from bpsfast.orchestration.store import StoreSpec, check


def nodes(*ranks):
    return [NodeInfo(index=i, host="a", pid=1, address="", shm_name="", ranks=each, nic_rate_bytes=0.0)
            for i, each in enumerate(ranks)]


def generations(policy="optimal"):
    return Generations(nodes((0, 1), (2,), ()), policy=policy, partition_nbytes=4096, fusion_nbytes=4096)


def spec(name="w", n_pages=3, **fields):
    return TensorSpec(**{"name": name, "dtype": "float32", "shape": (n_pages * 1024,), "average": False, "priority": 0,
                         "store": StoreSpec(worker="rank"), **fields})


@pytest.mark.parametrize(("fields", "word"), [
    (dict(rule="mean"), "mean"), (dict(worker="cluster"), "cluster"), (dict(rule="nesterov", worker="rank"), "rank"),
    (dict(learning_rate=0.0), "learning_rate=0"), (dict(rule="nesterov", momentum=1.0), "momentum=1"),
    (dict(staleness=-2), "staleness=-2")], ids=str)
def test_a_store_that_cannot_be_is_refused(fields, word):
    with pytest.raises(ConfigError, match=word):
        check(StoreSpec(**fields))


@pytest.mark.parametrize(("fields", "word"), [
    (dict(dtype="int32"), "int32"), (dict(op="max"), "max"), (dict(codec=CodecSpec(kind="onebit")), "onebit"),
    (dict(edition_of="e"), "editions")], ids=str)
def test_a_tensor_that_cannot_be_kept_is_refused(fields, word):
    with pytest.raises(UnsupportedError, match=word):
        check_store(spec(**fields))
    (failed,) = Declarations(1).add(0, [spec(**fields)])
    assert word in str(failed.error)


@pytest.mark.parametrize("policy", ["optimal", "colocated", "ps", "hash:djb2"])
@pytest.mark.parametrize(("worker", "ranks"), [("rank", [(0,), (1,), (2,)]), ("node", [(0, 1), (2,)]), ("job", [()])])
def test_each_worker_has_a_unit_cut_and_placed_like_the_others(policy, worker, ranks):
    ours = generations(policy)
    plan = ours.propose([spec(store=StoreSpec(worker=worker)), spec("v", 2, store=StoreSpec(worker=worker))])
    of_w = [unit for unit in plan.units if unit.name == "w"]
    assert [unit.ranks for unit in of_w] == ranks and {unit.n_workers for unit in of_w} == {len(ranks)}
    assert {unit.store_unit for unit in of_w} == {of_w[0].unit}
    cuts = {tuple((part.offset, part.nbytes, part.owner) for part in unit.parts) for unit in of_w}
    assert len(cuts) == 1 and {owner for cut in cuts for _, _, owner in cut} <= {0, 1}, "a helper cannot save them"
    numbers = [part.part for unit in plan.units for part in unit.parts]
    assert len(set(numbers)) == len(numbers) and len({unit.unit for unit in plan.units}) == len(plan.units)


def test_members_of_a_group_are_fused_where_their_stores_are_alike():
    other = StoreSpec(worker="rank", staleness=1)
    plan = generations().propose([spec("a", 1, shape=(4,), group="g"), spec("b", 1, shape=(4,), group="g"),
                                  spec("c", 1, shape=(4,), group="g", store=other)])
    assert sorted({tuple(member.name for member in unit.members) for unit in plan.units}) == [("a", "b"), ("c",)]


def test_a_name_is_free_once_all_workers_have_retired_theirs():
    ours = generations()
    plan = ours.propose([spec()])
    for node in range(3):
        ours.ready(node, plan.generation)
    units = {unit.ranks: unit.unit for unit in plan.units}
    over, unknown = ours.retire(0, [units[0,]], 3)
    assert [unit.unit for unit in over] == [units[0,]] and not unknown
    assert ours.is_retiring(0, [spec("w")]) and not ours.is_retiring(1, [spec("w")]) and ours.is_committed("w")
    ours.retire(1, [units[1,]], 3)
    assert ours.is_retiring(0, [spec("w")]) and ours.is_retiring(1, [spec("w")])
    ours.retire(2, [units[2,]], 3)
    assert not any(ours.is_retiring(rank, [spec("w")]) for rank in range(3)) and not ours.is_committed("w")


def test_more_partitions_than_a_job_can_have_are_refused_in_words():
    with pytest.raises(CapacityError, match=r"worker .*90000 partitions, 65536"):
        generations().propose([spec(n_pages=30_000)])
