"""Regions: page-aligned pieces that never overlap, few segments, exact accounts, refusal before a page is touched."""
from __future__ import annotations

import contextlib

import psutil
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.node import regions as regions_module
from bpsfast.node.regions import MIN_SEGMENT_NBYTES, PAGE_NBYTES, Regions, page_round
from bpsfast.orchestration.errors import CapacityError
from bpsfast.pyx import pages
from bpsfast.pyx.pages import Segment, Window


@pytest.fixture
def regions():
    made = Regions()
    yield made
    made.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3 * MIN_SEGMENT_NBYTES // 2), min_size=1, max_size=12))
def test_pieces_are_aligned_and_do_not_overlap(sizes):
    regions = Regions()
    arena = regions.arena("input")
    taken: dict[int, list[tuple[int, int]]] = {}
    for nbytes in sizes:
        place, _ = arena.allocate(nbytes)
        segment = regions.chunk(place.segment).segment
        assert place.offset % PAGE_NBYTES == 0 and place.address == segment.address + place.offset
        assert place.offset + nbytes <= segment.nbytes
        for begin, end in taken.setdefault(place.segment, []):
            assert place.offset + nbytes <= begin or end <= place.offset
        taken[place.segment].append((place.offset, place.offset + page_round(nbytes)))
    assert regions.nbytes == regions.nbytes_by_kind()["input"] == arena.nbytes
    regions.close()


def test_a_new_segment_holds_all_that_is_coming(regions):
    coming = [5 << 20, 3 << 20, 100]
    places = []
    for position, nbytes in enumerate(coming):
        places.append(regions.results.allocate(nbytes, sum(map(page_round, coming[position:])))[0])
    assert {place.segment for place in places} == {0}
    assert regions.n_segments == 1
    assert regions.nbytes == page_round(sum(map(page_round, coming)))


def test_many_small_pieces_share_a_segment(regions):
    arena = regions.arena("input")
    fresh = [arena.allocate(100)[1] for _ in range(MIN_SEGMENT_NBYTES // PAGE_NBYTES)]
    assert fresh[0] is not None and fresh[1:] == [None] * (len(fresh) - 1)


def test_segment_numbers_are_unique_over_all_kinds(regions):
    numbers = [arena.allocate(1)[0].segment for arena in
               (regions.arena("input"), regions.results, regions.partials, regions.slots, regions.arena("input"))]
    assert numbers == [0, 1, 2, 3, 4]
    assert regions.nbytes_by_kind() == {kind: n * MIN_SEGMENT_NBYTES for kind, n in
                                        (("input", 2), ("result", 1), ("partial", 1), ("slot", 1))}


def test_what_can_be_owned_is_what_memory_is_left_for():
    assert Regions().ownable_nbytes(3) == Regions().room_nbytes == -1
    regions = Regions(max_bytes=10 * MIN_SEGMENT_NBYTES)
    assert regions.room_nbytes == 8 * MIN_SEGMENT_NBYTES and regions.ownable_nbytes(2) == 2 * MIN_SEGMENT_NBYTES
    regions.slots.allocate(2 * MIN_SEGMENT_NBYTES, 6 * MIN_SEGMENT_NBYTES)
    regions.results.allocate(2 * MIN_SEGMENT_NBYTES, 4 * MIN_SEGMENT_NBYTES)
    assert regions.room_nbytes == 0
    assert regions.ownable_nbytes(2) == MIN_SEGMENT_NBYTES, "in what the segments have left"
    assert regions.ownable_nbytes(8) == MIN_SEGMENT_NBYTES // 2
    regions.close()


def test_max_bytes_is_refused_with_both_numbers():
    regions = Regions(max_bytes=3 * MIN_SEGMENT_NBYTES)
    regions.results.allocate(MIN_SEGMENT_NBYTES)
    wanted = 2 * MIN_SEGMENT_NBYTES + 1
    both = rf"needs {page_round(wanted)} more bytes.*leaves {2 * MIN_SEGMENT_NBYTES} "
    with pytest.raises(CapacityError, match=both):
        regions.slots.allocate(wanted)
    with pytest.raises(CapacityError, match="generation 7 needs"):
        regions.require(((regions.results, wanted), (regions.slots, 0)), "generation 7")
    regions.require(((regions.results, MIN_SEGMENT_NBYTES), (regions.slots, 1)), "generation 8")
    assert regions.n_segments == 1
    regions.close()


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched(regions):
    before = psutil.virtual_memory()
    with pytest.raises(CapacityError, match=r"needs \d+ bytes .* but .* has \d+ bytes"):
        regions.slots.allocate(before.total * 2)
    assert regions.n_segments == 0


def test_results_can_be_mapped_side_by_side(regions):
    places = [regions.results.allocate(nbytes, MIN_SEGMENT_NBYTES)[0] for nbytes in (100, PAGE_NBYTES + 1, 100)]
    extents = [(regions.chunk(place.segment).segment.fileno(), place.offset, PAGE_NBYTES) for place in reversed(places)]
    with contextlib.closing(Window(extents)) as window:
        assert window.nbytes == 3 * PAGE_NBYTES


def test_memory_is_zero(regions):
    place, chunk = regions.slots.allocate(MIN_SEGMENT_NBYTES)
    assert place.offset == 0 and bytes(memoryview(chunk.segment)) == bytes(MIN_SEGMENT_NBYTES)


class Registry:
    """Registers up to a number of segments."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen: list[tuple[str, int]] = []

    def require(self, nbytes: int, purpose: str) -> None:
        if nbytes > 1 << 30:
            raise CapacityError(f"{purpose}: {nbytes}")

    def register(self, kind: str, segment) -> None:
        if len(self.seen) == self.n:
            raise CapacityError("full")
        self.seen.append((kind, segment.address))


def test_a_registrar_sees_every_segment_once_and_may_refuse_it(no_leaks):
    regions = Regions()
    first, _ = regions.results.allocate(5000)
    registry = Registry(2)
    regions.register_with(registry)
    assert registry.seen == [("result", first.address)]
    second, _ = regions.slots.allocate(5000)
    regions.slots.allocate(5000)  # in the same segment
    assert registry.seen[1:] == [("slot", second.address)]
    with pytest.raises(CapacityError, match="full"):
        regions.partials.allocate(5000)
    assert regions.n_segments == 2 and "partial" not in regions.nbytes_by_kind()
    with pytest.raises(CapacityError, match="a plan: "):
        regions.require([(regions.partials, 2 << 30)], "a plan")
    regions.close()


def test_memory_that_somebody_holds_keeps_no_other_segment():
    regions = Regions()
    held = regions.slots.allocate(5000)[0].segment, regions.results.allocate(5000)[0].segment
    with memoryview(regions.chunk(held[0]).segment):
        with pytest.raises(BufferError, match="live exports"):
            regions.close()
        assert [regions.chunk(number).segment.address != 0 for number in held] == [True, False]
    regions.close()
    assert regions.chunk(held[0]).segment.address == 0


def test_memory_that_a_lost_peer_has_left_is_registered_and_closed_with_ours(no_leaks):
    regions = Regions()
    registry = Registry(1)
    regions.register_with(registry)
    left = Segment(PAGE_NBYTES)
    regions.adopt(left)
    assert registry.seen == [("result", left.address)]
    assert regions.n_segments == 0 and regions.nbytes == 0, "it is not ours to give out"
    with Segment(PAGE_NBYTES) as more, pytest.raises(CapacityError, match="full"):
        regions.adopt(more)
    regions.close()
    assert left.closed


@pytest.fixture
def scarce(monkeypatch):
    """A machine with nothing to spare but what a pool of huge pages holds."""
    pool = {"nbytes": 0}
    full = [regions_module.MemoryLimit("the machine", 1 << 36, 0)]
    monkeypatch.setattr(regions_module, "memory_limits", lambda *_: full)
    monkeypatch.setattr(regions_module, "pool_nbytes",
                        lambda nbytes, taken=0: nbytes if pool["nbytes"] >= nbytes + taken else 0)
    return pool


def test_the_pool_of_huge_pages_counts_where_segments_come_from_it(scarce):
    regions = Regions(huge_pages=True)
    scarce["nbytes"] = 4 * MIN_SEGMENT_NBYTES
    regions.require(((regions.slots, 2 * MIN_SEGMENT_NBYTES), (regions.partials, 2 * MIN_SEGMENT_NBYTES)), "both")
    with pytest.raises(CapacityError, match=rf"all needs {MIN_SEGMENT_NBYTES} bytes"):
        regions.require(((regions.slots, 2 * MIN_SEGMENT_NBYTES), (regions.partials, 2 * MIN_SEGMENT_NBYTES),
                         (regions.frames, MIN_SEGMENT_NBYTES)), "all")
    with pytest.raises(CapacityError, match="results needs"):
        regions.require(((regions.results, MIN_SEGMENT_NBYTES),), "results")  # never of the pool
    with pytest.raises(CapacityError, match="needs"):
        Regions().require(((regions.slots, MIN_SEGMENT_NBYTES),), "without huge pages")


def test_what_the_pool_does_not_give_after_all_is_looked_for_and_refused_as_any(scarce):
    regions = Regions(huge_pages=True)
    scarce["nbytes"] = 1 << 30  # says the kernel, and somebody else takes it: this machine's own pool is not so large
    if pages.huge_page_nbytes() >= 1 << 29:
        pytest.skip("this machine has such a pool")
    with pytest.raises(CapacityError, match="a segment for slots needs"):
        regions.slots.allocate(1 << 29)
    assert regions.n_segments == 0
