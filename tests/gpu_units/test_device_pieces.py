"""Units by partitions: every byte of every load is copied once, to where it belongs."""
from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from bpsfast.gpu.copies import DeviceRange, PartitionCopy, partition_copies


@st.composite
def units(draw):
    """A unit's bytes, the stride of its partitions, and loads within it that do not overlap, in any order."""
    stride = 64 * draw(st.integers(1, 5))
    edges = sorted(draw(st.sets(st.integers(0, 2000), max_size=10)))
    loads = [DeviceRange(begin, draw(st.integers(1, 1 << 40)), end - begin)
             for begin, end in pairwise(edges) if draw(st.booleans())]
    nbytes = (edges[-1] if edges else 0) + draw(st.integers(0, 300))
    return nbytes, stride, draw(st.permutations(loads))


@given(units())
def test_every_byte_once_and_inside_its_partition(unit):
    nbytes, stride, loads = unit
    pieces = partition_copies(nbytes, stride, loads)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    assert sum(piece.nbytes for piece in pieces) == nbytes
    assert all(piece.nbytes == stride for piece in pieces[:-1])
    found = {}
    for piece in pieces:
        for load in piece.copies:
            begin = piece.number * stride
            assert begin <= load.offset < load.offset + load.nbytes <= begin + piece.nbytes
            for i in range(load.nbytes):
                assert load.offset + i not in found
                found[load.offset + i] = load.address + i
    assert found == {load.offset + i: load.address + i for load in loads for i in range(load.nbytes)}


@given(units())
def test_copies_are_in_order(unit):
    copies = [load.offset for piece in partition_copies(*unit) for load in piece.copies]
    assert copies == sorted(copies)


def test_what_needs_no_copy_is_announced_too():
    assert partition_copies(100, 64, []) == [PartitionCopy(0, 64, ()), PartitionCopy(1, 36, ())]


def test_nothing_has_no_partitions():
    assert partition_copies(0, 64, [DeviceRange(0, 1, 0)]) == []
