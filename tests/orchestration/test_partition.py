"""Tensors to units to partitions."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import CapacityError, UnsupportedError
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.placement.partition import (
    CACHED_NBYTES,
    ITEM_NBYTES,
    MAX_PARTS,
    OPS,
    nbytes_of,
    plan_units,
    round_up,
)
from bpsfast.orchestration.store import StoreSpec

PAGE = 4096


def spec(name, n_elements, dtype="float32", **fields):
    return TensorSpec(name=name, dtype=dtype, shape=(n_elements,), **fields)


def plan(*specs, first_unit=0, first_part=0, partition_nbytes=4096000, fusion_nbytes=4096000):
    return plan_units(specs, first_unit, first_part, partition_nbytes, fusion_nbytes)


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), [
    ("float32", (), 4), ("float64", (3,), 24), ("bfloat16", (2, 3), 12), ("uint8", (0, 7), 0),
    ("int16", (1 << 20, 1 << 12), 1 << 33),
])
def test_nbytes_of(dtype, shape, nbytes):
    assert nbytes_of(TensorSpec(name="x", dtype=dtype, shape=shape)) == nbytes


@pytest.mark.parametrize(("dtype", "shape", "text"), [
    ("uint16", (2,), "'x' has dtype 'uint16'; supported: float32"), ("float32", (-1,), "negative dimension"),
])
def test_unsupported(dtype, shape, text):
    with pytest.raises(UnsupportedError, match=text):
        plan(TensorSpec(name="x", dtype=dtype, shape=shape))


@pytest.mark.parametrize(("fields", "text"), [
    ({"op": "median", "average": False}, "'x' is to be reduced by 'median'; supported: sum, product, min"),
    ({"op": "max"}, "'x': the max of inputs cannot be averaged; average=False"),
    ({"op": "band", "average": False}, "'x' has dtype float32, whose bits band does not mean; it takes integers"),
    ({"op": "bxor", "average": False, "dtype": "bfloat16"}, "'x' has dtype bfloat16, whose bits"),
])
def test_what_is_not_done_with_inputs(fields, text):
    with pytest.raises(UnsupportedError, match=text):
        plan(TensorSpec(**{"name": "x", "dtype": "float32", "shape": (2,), **fields}))


@pytest.mark.parametrize("op", OPS)
def test_ops_never_mix_and_units_say_theirs_and_whose_they_are(op):
    members = [spec(f"{i} {each}", 8, "int16", group="g", op=each, average=False, ranks=(0, 2))
               for i in range(2) for each in ("sum", op)]
    units = plan(*members)
    assert [(unit.op, len(unit.members)) for unit in units] == ([("sum", 4)] if op == "sum" else [("sum", 2), (op, 2)])
    assert {unit.ranks for unit in units} == {(0, 2)}
    (lone,) = plan(spec("x", 8, "uint8", op=op, average=False))
    assert (lone.op, lone.ranks) == (op, ())


def test_lone_tensors_are_units_of_their_own():
    a, b = plan(spec("a", 10), spec("b", 2048, "float16", average=False, priority=-7), first_unit=3, first_part=9)
    assert (a.unit, a.name, a.dtype, a.average, a.priority, a.nbytes) == (3, "a", "float32", True, 0, 40)
    assert a.stride == PAGE
    assert [(p.part, p.offset, p.nbytes, p.owner) for p in a.parts] == [(9, 0, 40, -1)]
    assert (b.unit, b.name, b.dtype, b.average, b.priority, b.nbytes) == (4, "b", "float16", False, -7, 4096)
    assert [p.part for p in b.parts] == [10]


def test_partitions_are_even_and_the_last_is_short():
    (unit,) = plan(spec("a", 2_500_000))  # 10 MB: three partitions
    assert unit.stride == round_up(10_000_000 // 3 + 1, PAGE) <= 4096000
    assert [p.nbytes for p in unit.parts] == [unit.stride, unit.stride, 10_000_000 - 2 * unit.stride]
    assert [p.offset for p in unit.parts] == [0, unit.stride, 2 * unit.stride]


@pytest.mark.parametrize(("n_floats", "n_parts"), [(262143, 1), (262144, 2), (1_000_000, 2), (2_100_000, 3)])
def test_a_megabyte_is_shared_by_two(n_floats, n_parts):
    (unit,) = plan_units([TensorSpec(name="x", dtype="float32", shape=(n_floats,))], 0, 0, 4096000, 4096000)
    assert len(unit.parts) == n_parts
    assert sum(part.nbytes for part in unit.parts) == 4 * n_floats
    grouped = TensorSpec(name="x", dtype="float32", shape=(n_floats,), group="g")
    assert len(plan_units([grouped], 0, 0, 4096000, 4096000)[0].parts) == -(-4 * n_floats // 4096000)


def test_a_tensor_may_ask_for_its_own_partitions():
    (unit,) = plan(spec("channel", 16 * 262144, "uint8", partition_nbytes=262144))
    assert unit.stride == 262144 and [p.nbytes for p in unit.parts] == [262144] * 16


def within(*specs, partition_nbytes=4096000, **options):
    return plan_units(specs, 0, 0, partition_nbytes, 4096000, is_within=True, **options)


@pytest.mark.parametrize(("fields", "stride"), [
    ({}, CACHED_NBYTES), ({"partition_nbytes": 4 << 20}, 4 << 20), ({"group": "g"}, 2797568),
    ({"on_device": True}, 2797568), ({"codec": CodecSpec(kind="onebit")}, 2797568), ({"store": StoreSpec()}, 2797568),
])
def test_within_one_machine_what_the_cpu_copies_stays_in_caches(fields, stride):
    tensor = TensorSpec(**{"name": "x", "dtype": "float32", "shape": (2 << 20,), **fields})
    assert [unit.stride for unit in within(tensor)] == [stride]
    if not fields:
        assert [unit.stride for unit in plan_units([tensor], 0, 0, 4096000, 4096000)] == [2797568]
        assert [unit.stride for unit in within(tensor, partition_nbytes=64 << 10)] == [64 << 10]


def test_a_table_by_rows_is_cut_as_between_machines():
    table = TensorSpec(name="t", dtype="float32", shape=(1 << 18, 32), op="rows", max_rows=1 << 16)
    assert within(table) == plan_units([table], 0, 0, 4096000, 4096000)


def test_caches_count_only_while_the_job_has_few_partitions():
    huge = TensorSpec(name="x", dtype="uint8", shape=(MAX_PARTS // 2 * CACHED_NBYTES,))
    (unit,) = within(huge)
    assert (unit.stride, len(unit.parts)) == (CACHED_NBYTES, MAX_PARTS // 2)
    first, second = within(huge, spec("y", 1))
    assert len(first.parts) == -(-huge.shape[0] // first.stride) and first.stride > 7 * CACHED_NBYTES
    assert second.parts[0].part == len(first.parts)
    (late,) = plan_units([huge], 0, 1, 4096000, 4096000, is_within=True)
    assert late.stride == first.stride and late.parts[0].part == 1


@pytest.mark.parametrize(("partition_nbytes", "stride"), [
    (1, PAGE), (4095, PAGE), (10000, 2 * PAGE), (16384, 4 * PAGE),
])
def test_partition_size_is_rounded_down_to_pages(partition_nbytes, stride):
    (unit,) = plan(spec("a", 16 * PAGE, "uint8"), partition_nbytes=partition_nbytes)
    assert unit.stride == stride


def test_a_tensor_without_bytes_has_no_partitions():
    empty, scalar = plan(TensorSpec(name="e", dtype="float32", shape=(0, 3)),
                         TensorSpec(name="s", dtype="float32", shape=()))
    assert (empty.nbytes, empty.parts, empty.stride) == (0, (), PAGE)
    assert [(p.part, p.nbytes) for p in scalar.parts] == [(0, 4)]


def test_group_members_are_packed_in_order():
    units = plan(*(spec(name, n, group="g") for name, n in [("w1", 100), ("b1", 3), ("empty", 0), ("w2", 16)]))
    assert [(u.name, u.nbytes) for u in units] == [("g#0", 576)]
    assert [(m.name, m.offset, m.nbytes) for m in units[0].members] == [
        ("w1", 0, 400), ("b1", 448, 12), ("empty", 512, 0), ("w2", 512, 64)]


def test_a_full_unit_is_followed_by_another():
    units = plan(*(spec(f"t{i}", 256, group="g") for i in range(5)), fusion_nbytes=2048)
    assert [(u.name, [m.name for m in u.members]) for u in units] == [
        ("g#0", ["t0", "t1"]), ("g#1", ["t2", "t3"]), ("g#2", ["t4"])]


def test_a_large_member_stands_alone_and_does_not_split_its_neighbours():
    units = plan(spec("b1", 4, group="g"), spec("w", 512, group="g"), spec("b2", 4, group="g"), fusion_nbytes=2048)
    assert [(u.name, [m.name for m in u.members]) for u in units] == [("g#0", ["b1", "b2"]), ("w", ["w"])]
    assert [p.part for u in units for p in u.parts] == [0, 1]


def test_dtypes_and_divisors_never_mix():
    units = plan(spec("a", 4, group="g"), spec("h", 4, "float16", group="g"), spec("s", 4, group="g", average=False),
                 spec("b", 4, group="g"), spec("other", 4, group="k"))
    assert [(u.name, [m.name for m in u.members]) for u in units] == [
        ("g#0", ["a", "b"]), ("g#1", ["h"]), ("g#2", ["s"]), ("k#0", ["other"])]


def test_a_group_is_as_urgent_as_its_most_urgent_member():
    units = plan(spec("a", 4), spec("b", 4, group="g"), spec("c", 4, group="g"), spec("d", 4, group="h", priority=-9),
                 spec("e", 4, group="h", priority=5))
    assert [(u.name, u.priority) for u in units] == [("h#0", 5), ("a", 0), ("g#0", -1)]


def test_urgency_decides_who_travels_together():
    names = "abcdefgh"
    urgency = {name: place for place, name in enumerate("gaebhcfd")}
    units = plan(*(spec(name, 256, group="g", priority=-urgency[name]) for name in names), fusion_nbytes=3 * 1024)
    assert [[m.name for m in u.members] for u in units] == [["g", "a", "e"], ["b", "h", "c"], ["f", "d"]]
    assert [u.priority for u in units] == [0, -3, -6]
    assert [p.part for u in units for p in u.parts] == [0, 1, 2]


def test_too_many_partitions_name_both_numbers():
    plan(spec("a", MAX_PARTS * PAGE, "uint8"), partition_nbytes=PAGE)
    with pytest.raises(CapacityError, match=r"65537 partitions.*at most 65536.*partition_bytes \(now 4096\)"):
        plan(spec("a", MAX_PARTS * PAGE, "uint8"), first_part=1, partition_nbytes=PAGE)


specs = st.lists(
    st.builds(
        lambda dtype, shape, group, average: (dtype, tuple(shape), group, average),
        st.sampled_from(sorted(ITEM_NBYTES)), st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from([None, "g", "h"]), st.booleans()),
    min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(specs, st.integers(1, 5 * PAGE), st.integers(1, 20000), st.integers(0, 50))
def test_every_byte_lies_in_exactly_one_place(drawn, partition_nbytes, fusion_nbytes, first):
    tensors = [TensorSpec(name=f"t{i}", dtype=dtype, shape=shape, group=group, average=average)
               for i, (dtype, shape, group, average) in enumerate(drawn)]
    units = plan_units(tensors, first, first, partition_nbytes, fusion_nbytes)
    by_name = {member.name: (unit, member) for unit in units for member in unit.members}
    assert len(by_name) == sum(len(unit.members) for unit in units) == len(tensors)
    for tensor in tensors:
        unit, member = by_name[tensor.name]
        assert (unit.dtype, unit.average, member.shape) == (tensor.dtype, tensor.average, tensor.shape)
        assert member.nbytes == nbytes_of(tensor) and member.offset % 64 == 0
        assert tensor.group is not None or len(unit.members) == 1
    assert [unit.unit for unit in units] == list(range(first, first + len(units)))
    n_parts = sum(len(unit.parts) for unit in units)
    assert [p.part for unit in units for p in unit.parts] == list(range(first, first + n_parts))
    for unit in units:
        end = 0
        for member in unit.members:
            assert end <= member.offset < end + 64
            end = member.offset + member.nbytes
        assert unit.nbytes == end
        assert len(unit.members) == 1 or unit.nbytes <= fusion_nbytes
        assert unit.stride % PAGE == 0 and unit.stride <= max(partition_nbytes, PAGE)
        assert [p.offset for p in unit.parts] == list(range(0, unit.nbytes, unit.stride))
        assert sum(p.nbytes for p in unit.parts) == unit.nbytes
        assert all(p.nbytes % ITEM_NBYTES[unit.dtype] == 0 < p.nbytes <= unit.stride for p in unit.parts)


def test_a_group_may_ask_for_its_own_fusion():
    members = [spec(f"t{i}", 256, group="g", fusion_nbytes=2048) for i in range(5)]
    units = plan(*members, *(spec(f"u{i}", 256, group="h") for i in range(5)), fusion_nbytes=1024)
    assert [len(unit.members) for unit in units] == [2, 2, 1] + [1] * 5
    assert len(plan(*(spec(f"u{i}", 256, group="h", fusion_nbytes=8192) for i in range(5)), fusion_nbytes=1024)) == 1


def test_members_of_other_streams_stand_apart():
    members = [spec(f"t{i}", 256, group="g", n_streams=n_streams) for i, n_streams in enumerate((1, 1, 4))]
    assert [(len(unit.members), unit.n_streams) for unit in plan(*members)] == [(2, 1), (1, 4)]
