"""The order of writes: by urgency within a pass, and no pass overtakes another."""
from __future__ import annotations

from hypothesis import given, strategies as st

from bpsfast.orchestration.write_order import WriteOrder, urgency


def test_units_by_urgency_and_within_one_partials_before_results():
    order = WriteOrder()
    writes = [(part, rank, is_result) for part, (rank, is_result) in enumerate(
        [(1, True), (0, True), (1, False), (0, False)])]
    orders = {write: order.enter(*write) for write in writes}
    assert sorted(writes, key=orders.__getitem__) == [(3, 0, False), (1, 0, True), (2, 1, False), (0, 1, True)]
    assert urgency(orders[3, 0, False]) == urgency(orders[1, 0, True]) < urgency(orders[2, 1, False])


def test_what_comes_again_begins_a_pass_that_leaves_after_all_of_the_pass_before():
    order = WriteOrder()
    last = order.enter(7, 1000, True)
    assert order.enter(1, 0, False) < last < order.enter(1, 0, False)


def test_a_tensor_that_is_pushed_now_and_then_joins_the_pass_that_is_under_way():
    order = WriteOrder()
    order.enter(5, 3, False)
    for _ in range(10):
        frequent = order.enter(1, 4, False)
    assert urgency(order.enter(5, 3, False)) == urgency(frequent) - 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60))
def test_a_partition_never_overtakes_itself_and_all_of_one_pass_go_by_urgency(entered):
    order, last = WriteOrder(), {}
    seen: set[int] = set()
    passes: list[list[tuple[int, tuple[int, bool]]]] = [[]]
    for part, rank, is_result in entered:
        if part in seen:
            seen.clear()
            passes.append([])
        seen.add(part)
        found = order.enter(part, rank, is_result)
        assert found > last.get(part, -1) or part not in last
        last[part] = found
        passes[-1].append((found, (rank, is_result)))
    expected = [key for each in passes for key in sorted(key for _, key in each)]
    assert [key for _, key in sorted(entry for each in passes for entry in each)] == expected
