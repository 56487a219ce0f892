"""Tests Slurm's short forms of lists against an oracle that enumerates them."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.launch.slurm import expand_nodes, tasks_per_node


@pytest.mark.parametrize(("text", "names"), [
    ("node1", ["node1"]),
    ("a,b", ["a", "b"]),
    ("a[1-3,07,10-12]b", ["a1b", "a2b", "a3b", "a07b", "a10b", "a11b", "a12b"]),
    ("gpu[01-03],login", ["gpu01", "gpu02", "gpu03", "login"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[099-101]", ["n099", "n100", "n101"]),
    ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ("c[1,3]-ib[0-1].x,d[5]", ["c1-ib0.x", "c1-ib1.x", "c3-ib0.x", "c3-ib1.x", "d5"]),
    ("10.77.0.[1-2]", ["10.77.0.1", "10.77.0.2"]),
])
def test_lists(text, names):
    assert expand_nodes(text) == names


@pytest.mark.parametrize(("text", "reason"), [
    ("", "empty"),
    ("a,,b", "empty"),
    ("a,", "empty"),
    ("a[1-3", "not closed"),
    ("a1-3]", "do not match"),
    ("a[1[2]]", "do not match"),
    ("a[]", "no number"),
    ("a[1,]", "no number"),
    ("a[x-y]", "no number"),
    ("a[1-2-3]", "no number"),
    ("a[5-3]", "ends before it begins"),
    ("a[0-99999999999]", "more than 65536"),
    ("a[0-999]b[0-999]", "more than 65536"),
    ("a[٣]", "no number"),
])
def test_what_is_no_list_is_said(text, reason):
    with pytest.raises(ValueError, match=reason):
        expand_nodes(text)


_LETTERS = st.text("abz-.x0", min_size=1, max_size=3)
_RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 15), st.integers(1, 4)), min_size=1, max_size=3)
_PIECES = st.lists(st.one_of(_LETTERS, _RANGES), min_size=1, max_size=3)


@given(st.lists(_PIECES, min_size=1, max_size=3))
def test_any_list_is_what_counting_out_gives(items):
    text, names = [], []
    for pieces in items:
        item, found = "", [""]
        for piece in pieces:
            if isinstance(piece, str):
                item += piece
                found = [name + piece for name in found]
                continue
            numbers, written = [], []
            for first, more, width in piece:
                digits = str(first).zfill(width)
                number = first
                while number <= first + more:
                    numbers.append("0" * (len(digits) - len(str(number))) + str(number))
                    number += 1
                written.append(f"{digits}-{first + more}" if more else digits)
            item += f"[{','.join(written)}]"
            found = [name + number for name in found for number in numbers]
        text.append(item)
        names += found
    assert expand_nodes(",".join(text)) == names


@given(st.text("ab[]-,019", max_size=12))
def test_any_text_is_a_list_or_an_error(text):
    try:
        names = expand_nodes(text)
    except ValueError as exc:
        assert str(exc)
    else:
        assert names and all(names) and not any(letter in name for name in names for letter in "[],")


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3),1", [1, 2, 2, 2, 1])])
def test_tasks(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2)", "4(x)", "4,", "-1", "4(x99999999)"])
def test_what_is_no_number_of_tasks_is_said(text):
    with pytest.raises(ValueError, match=r"number of tasks|more than"):
        tasks_per_node(text)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_any_tasks_are_what_counting_out_gives(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]
