"""Names become keys only when every rank has said the same of them."""
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import CapacityError, ConfigError, MismatchError, UnsupportedError
from bpsfast.orchestration.job.declarations import Declarations
from bpsfast.orchestration.messages import TensorSpec


def spec(name, **fields):
    return TensorSpec(**{"name": name, "dtype": "float32", "shape": (2, 3), **fields})


def names(specs):
    return [each.name for each in specs]


def test_a_name_is_complete_when_all_ranks_have_declared_it():
    ours = Declarations(2)
    assert ours.add(1, [spec("a"), spec("b")]) == []
    assert ours.take_complete() == [] and ours.missing("a") == [0] and ours.missing("zzz") == [0, 1]
    assert ours.add(0, [spec("b")]) == []
    assert names(ours.take_complete()) == ["b"]
    assert ours.take_complete() == [] and ours.missing("b") == []


def test_order_and_priorities_are_rank_zeros():
    ours = Declarations(2)
    ours.add(1, [spec("c", priority=9), spec("b"), spec("a", priority=3)])
    ours.add(0, [spec("a"), spec("b", priority=5), spec("c")])
    assert [(s.name, s.priority) for s in ours.take_complete()] == [("a", 0), ("b", 5), ("c", -2)]


@settings(deadline=None)
@given(st.permutations([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]))
def test_positions_do_not_depend_on_other_ranks_timing(deliveries):
    """Three ranks say three names one by one; each rank in its own order, the ranks interleaved in any way."""
    ours = Declarations(3)
    orders = {0: ["a", "b", "c"], 1: ["c", "a", "b"], 2: ["b", "c", "a"]}
    said = {rank: 0 for rank in orders}
    taken = []
    for rank, _ in deliveries:
        assert ours.add(rank, [spec(orders[rank][said[rank]])]) == []
        said[rank] += 1
        taken += ours.take_complete()
    assert sorted((s.name, s.priority) for s in taken) == [("a", 0), ("b", -1), ("c", -2)]


@pytest.mark.parametrize(("fields", "words"), [
    ({"dtype": "int32"}, "dtype differs: 'float32' on rank 1, 'int32' on rank 0"),
    ({"shape": (3, 2)}, r"shape differs: \(2, 3\) on rank 1, \(3, 2\) on rank 0"),
    ({"average": False}, "average differs: True on rank 1, False on rank 0"),
    ({"group": "g"}, "group differs: nothing on rank 1, 'g' on rank 0"),
    ({"partition_nbytes": 4096}, "partition_nbytes differs: 0 on rank 1, 4096 on rank 0"),
])
def test_a_mismatch_names_field_values_and_ranks(fields, words):
    ours = Declarations(3)
    ours.add(1, [spec("a"), spec("b")])
    (failed,) = ours.add(0, [spec("a", **fields)])
    assert failed.names == ("a",) and failed.ranks == (0, 1)
    with pytest.raises(MismatchError, match="'a': " + words):
        raise failed.error
    (late,) = ours.add(2, [spec("a"), spec("b")])
    assert late.ranks == (2,) and late.error is failed.error is ours.why_failed("a")
    assert ours.why_failed("b") is None and ours.missing("b") == [0]


def group(*members, **fields):
    return [spec(name, group="g", **fields) for name in members]


def test_a_group_is_complete_as_a_whole():
    ours = Declarations(2)
    ours.add(0, [spec("x"), *group("a", "b")])
    ours.add(1, group("a", "b"))
    assert [(s.name, s.priority) for s in ours.take_complete()] == [("a", -1), ("b", -2)]


@pytest.mark.parametrize(("theirs", "words"), [
    (("b", "a"), "member 0 is 'a' on rank 0, 'b' on rank 1"),
    (("a",), "rank 0 declared 2, rank 1 declared 1; member 1 is 'b' on rank 0, nothing on rank 1"),
    (("a", "b", "c"), "member 2 is nothing on rank 0, 'c' on rank 1"),
])
def test_groups_must_have_the_same_members_in_one_order(theirs, words):
    ours = Declarations(2)
    ours.add(0, group("a", "b"))
    (failed,) = ours.add(1, group(*theirs))
    assert set(failed.names) == {"a", "b", *theirs} and failed.ranks == (0, 1)
    with pytest.raises(MismatchError, match=words):
        raise failed.error


def test_one_bad_member_fails_its_whole_group():
    ours = Declarations(2)
    ours.add(0, group("a", "b"))
    (failed,) = ours.add(1, [*group("a"), *group("b", dtype="int8")])
    assert set(failed.names) == {"a", "b"}
    assert ours.add(0, group("a", "b"))[0].error is failed.error


def test_saying_the_same_again_changes_nothing():
    ours = Declarations(2)
    ours.add(0, [spec("a")])
    assert ours.add(0, [spec("a")]) == [] and ours.missing("a") == [1]
    ours.add(1, [spec("a")])
    assert names(ours.take_complete()) == ["a"]
    assert ours.add(1, [spec("a")]) == [] and ours.take_complete() == []


def test_a_committed_name_survives_a_wrong_declaration():
    ours = Declarations(2)
    for rank in (0, 1):
        ours.add(rank, [spec("a")])
    ours.take_complete()
    (failed,) = ours.add(1, [spec("a", dtype="int8")])
    assert failed.ranks == (1,) and isinstance(failed.error, MismatchError)
    assert ours.why_failed("a") is None and ours.add(1, [spec("a")]) == []


def test_twice_in_one_call():
    (failed,) = Declarations(1).add(0, [spec("a"), spec("a")])
    assert isinstance(failed.error, ConfigError) and "'a' is declared twice" in str(failed.error)


@pytest.mark.parametrize("fields", [{"dtype": "uint16"}, {"shape": (-1,)}])
def test_what_cannot_be_summed_fails_at_once(fields):
    ours = Declarations(2)
    (failed,) = ours.add(1, [spec("a", **fields)])
    assert isinstance(failed.error, UnsupportedError) and failed.ranks == (1,)
    assert ours.add(0, [spec("a", **fields)])[0].error is failed.error


def test_giving_up_tells_whoever_comes_again():
    ours = Declarations(1)
    ours.add(0, [spec("a"), spec("b")])
    taken = ours.take_complete()
    error = CapacityError("full")
    ours.give_up(names(taken), error)
    assert [failed.error for failed in ours.add(0, [spec("a"), spec("b"), spec("c")])] == [error, error]
    assert names(ours.take_complete()) == ["c"]


def test_explicit_priorities_are_kept():
    ours = Declarations(1)
    ours.add(0, [spec("a", priority=-50), spec("b")])
    taken = ours.take_complete()
    assert taken == [spec("a", priority=-50), msgspec.structs.replace(spec("b"), priority=-1)]


def test_what_is_forgotten_may_be_declared_otherwise():
    ours = Declarations(2)
    group = [spec("a", group="g"), spec("b", group="g")]
    for rank in (0, 1):
        assert ours.add(rank, [*group, spec("c")]) == []
    assert names(ours.take_complete()) == ["a", "b", "c"]
    ours.forget(["a"])
    ours.forget(["b", "unknown"])
    assert ours.missing("a") == [0, 1] and ours.missing("c") == []
    for rank in (1, 0):
        assert ours.add(rank, [spec("b", shape=(9,)), spec("a", group="g")]) == []
    complete = ours.take_complete()
    assert names(complete) == ["b", "a"] and complete[0].priority > complete[1].priority
    assert complete[0].shape == (9,)


@pytest.mark.parametrize("field", [{"fusion_nbytes": 5}, {"edition_of": "x"}, {"partition_nbytes": 5}])
def test_ranks_must_agree_on_how_it_is_cut(field):
    ours = Declarations(2)
    ours.add(0, [spec("a", group="g")])
    (failed,) = ours.add(1, [spec("a", group="g", **field)])
    assert isinstance(failed.error, MismatchError) and next(iter(field)) in str(failed.error)


def test_editions_come_by_themselves_after_what_is_none():
    ours = Declarations(1)
    ours.add(0, [spec("x~1", edition_of="x"), spec("a"), spec("y~1", edition_of="y"), spec("x~2", edition_of="x")])
    assert [names(ours.take_complete()) for _ in range(4)] == [["a"], ["x~1", "x~2"], ["y~1"], []]
    ours.add(0, [spec("x~3", edition_of="x")])
    assert names(ours.take_complete()) == ["x~3"]


def test_what_is_of_some_ranks_is_complete_once_these_have_declared_it():
    ours = Declarations(4)
    ours.add(2, [spec("a", ranks=(1, 2)), spec("b", ranks=(0, 2))])
    assert ours.take_complete() == [] and ours.missing("a") == [1] and ours.missing("b") == [0]
    assert ours.add(1, [spec("a", ranks=(1, 2))]) == []
    assert names(ours.take_complete()) == ["a"] and ours.missing("a") == [] and ours.missing("b") == [0]


def test_the_order_of_what_is_of_some_ranks_is_that_of_the_first_of_them():
    ours = Declarations(3)
    ours.add(2, [spec("b", ranks=(1, 2), priority=7), spec("a", ranks=(1, 2))])
    ours.add(1, [spec("a", ranks=(1, 2)), spec("b", ranks=(1, 2))])
    assert [(s.name, s.priority) for s in ours.take_complete()] == [("a", 0), ("b", -1)]


@pytest.mark.parametrize(("rank", "fields", "words"), [
    (0, {"ranks": (1, 2)}, r"'a' is of ranks \(1, 2\) only; rank 0 declared it"),
    (1, {"ranks": (2, 1)}, r"'a': ranks \(2, 1\) are not ascending ranks of a job of 3"),
    (1, {"ranks": (1, 1)}, r"ranks \(1, 1\) are not ascending"),
    (1, {"ranks": (1, 3)}, r"ranks \(1, 3\) are not ascending ranks of a job of 3"),
    (1, {"ranks": (-1, 1)}, r"ranks \(-1, 1\) are not ascending"),
])
def test_ranks_that_cannot_be_are_refused(rank, fields, words):
    (failed,) = Declarations(3).add(rank, [spec("a", **fields)])
    assert failed.ranks == (rank,)
    with pytest.raises(ConfigError, match=words):
        raise failed.error


def test_a_foreign_rank_spoils_a_declaration_for_all_who_wait():
    ours = Declarations(3)
    ours.add(1, [spec("a", ranks=(1, 2))])
    (failed,) = ours.add(0, [spec("a", ranks=(1, 2))])
    assert failed.ranks == (0, 1) and isinstance(failed.error, ConfigError)


@pytest.mark.parametrize("second", [{"ranks": (0, 1)}, {"ranks": (0,)}, {"edition_of": "x", "ranks": (0, 2)}])
def test_members_of_a_group_are_of_the_same_ranks(second):
    (failed,) = Declarations(3).add(0, [spec("a", group="g", ranks=(0, 2)), spec("b", group="g", **second)])
    assert isinstance(failed.error, ConfigError) and "members of one group are of the same ranks" in str(failed.error)
    assert set(failed.names) == {"a", "b"}


@pytest.mark.parametrize("fields", [{"op": "max", "average": False}, {"ranks": (0, 1)}])
def test_ranks_must_agree_on_what_is_done_and_by_whom(fields):
    ours = Declarations(3)
    ours.add(1, [spec("a", average=False)])
    (failed,) = ours.add(0, [spec("a", **{"average": False, **fields})])
    assert isinstance(failed.error, MismatchError) and f"{next(iter(fields))} differs" in str(failed.error)


def test_what_is_of_other_ranks_comes_by_itself():
    ours = Declarations(3)
    some = {"pair": (0, 1), "other": (1, 2)}
    for rank in range(3):
        ours.add(rank, [spec(f"{name} {i}", ranks=ranks) for i in range(2) for name, ranks in some.items()
                        if rank in ranks] + [spec("all")])
    taken = [names(ours.take_complete()) for _ in range(4)]
    assert taken[0] == ["all"] and sorted(taken[1:3]) == [["other 0", "other 1"], ["pair 0", "pair 1"]]
    assert taken[3] == []


def test_an_edition_of_some_ranks_is_a_family_of_its_own():
    ours = Declarations(2)
    ours.add(0, [spec("x~1", edition_of="x", ranks=(0,)), spec("y", ranks=(0,))])
    assert sorted(names(ours.take_complete()) for _ in range(2)) == [["x~1"], ["y"]]


@settings(deadline=None)
@given(st.data())
def test_every_set_of_ranks_gets_what_it_has_declared_once(data):
    """Any tensors of any ranks, said in any order: each is taken once, when the last of its ranks has said it."""
    size = data.draw(st.integers(1, 5))
    subsets = st.sets(st.integers(0, size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    of = {f"t{i}": data.draw(subsets | st.just(())) for i in range(data.draw(st.integers(1, 6)))}
    said = data.draw(st.permutations([(name, rank) for name, ranks in of.items() for rank in ranks or range(size)]))
    ours, have, taken = Declarations(size), {name: set() for name in of}, []
    for name, rank in said:
        assert ours.add(rank, [spec(name, ranks=of[name])]) == []
        have[name].add(rank)
        assert ours.missing(name) == [r for r in of[name] or range(size) if r not in have[name]]
        while found := ours.take_complete():
            assert len({each.ranks for each in found}) == 1
            assert all(len(have[each.name]) == len(of[each.name] or range(size)) for each in found)
            taken += names(found)
    assert sorted(taken) == sorted(of)


_SPECS = [spec("a"), spec("a", priority=3), spec("a", direct=True), spec("a", dtype="int8"), spec("b"),
          spec("b", group="g"), spec("c", group="g"), spec("c", ranks=(0, 2)), spec("d", ranks=(0, 2)), spec("d")]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.sampled_from(_SPECS), max_size=4).map(tuple),
                          st.sampled_from(["add", "add", "add", "take", "forget"])), max_size=25))
def test_ranks_are_counted_for_equal_calls_as_for_others(history):
    """With a digest of its own no call is like another: then each bundle is looked at."""
    together, apart = Declarations(3), Declarations(3)
    taken = []
    for number, (rank, tensors, kind) in enumerate(history):
        if kind == "add":
            failed = [[(each.names, type(each.error), each.ranks) for each in found] for found in (
                together.add(rank, tensors), apart.add(rank, tensors, digest=b"%d" % number))]
            assert failed[0] == failed[1]
        elif kind == "take":
            found = together.take_complete()
            assert found == apart.take_complete()
            taken += names(found)
        else:  # units that all their ranks have retired
            gone, taken = taken, []
            for ours in (together, apart):
                ours.forget(gone)
        for name in "abcd":
            assert together.missing(name) == apart.missing(name)
            assert type(together.why_failed(name)) is type(apart.why_failed(name))


def test_thousands_of_ranks_declare_the_same_without_a_look_at_each_tensor():
    """One rank declares with priorities of its own; the memory for a rank does not depend on the number of tensors."""
    ours, tensors = Declarations(2000), tuple(spec(f"t{i}") for i in range(100))
    ours.add(0, [msgspec.structs.replace(each, priority=i) for i, each in enumerate(tensors)])
    for rank in range(1, 2000):
        assert ours.take_complete() == [] and ours.missing("t7") == list(range(rank, 2000))
        assert ours.add(rank, tensors, digest=b"all") == []
    assert sum(len(bundle.declared) for bundle in ours._bundles.values()) == 200
    assert [(each.name, each.priority) for each in ours.take_complete()] == [(f"t{i}", i) for i in range(100)]


def test_ranks_whose_call_has_failed_in_part_cost_no_more_than_others():
    ours, tensors = Declarations(500), tuple(spec(f"t{i}") for i in range(100))
    ours.add(0, [spec("t0", dtype="int8"), *tensors[1:]])
    for rank in range(1, 500):
        (failed,) = ours.add(rank, tensors, digest=b"all")
        assert failed.names == ("t0",) and set(failed.ranks) == ({0, 1} if rank == 1 else {rank})
    assert names(ours.take_complete()) == names(tensors[1:])
    assert len(ours._calls) <= 1


def test_lists_that_differ_are_joined_without_a_look_at_each_other():
    """Every rank has priorities of its own."""
    ours = Declarations(300)
    for rank in range(300):
        ours.add(rank, [spec(f"t{i}", priority=rank) for i in range(50)])
    assert [each.priority for each in ours.take_complete()] == [0] * 50


def test_a_repetition_in_another_call_counts_once():
    ours = Declarations(3)
    ours.add(0, [spec("a")])
    ours.add(0, [spec("a"), spec("b")])
    for rank in (1, 2):
        ours.add(rank, [spec("a"), spec("b")])
    assert ours.missing("a") == [] and names(ours.take_complete()) == ["a", "b"]
    ours.forget(["a"])
    for rank in range(3):
        assert ours.add(rank, [spec("a"), spec("b")]) == []
    assert names(ours.take_complete()) == ["a"]


def test_the_first_declaration_of_a_rank_counts():
    ours = Declarations(2)
    ours.add(1, [spec("a", priority=3), spec("b")])
    ours.add(0, [spec("a")])
    ours.add(0, [spec("a", priority=3), spec("b")])
    assert [(each.name, each.priority) for each in ours.take_complete()] == [("a", 0), ("b", -1)]
