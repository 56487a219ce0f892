"""All interleavings of the protocols of `direct.h` and `direct_calls.h`: no rank reads too early, or too late.

What a rank does in some calls is a list of steps: write a place, publish a word, wait for a word, or read a place and
find there what the protocol promises. The test tries every order of the steps of two or three ranks. Without one of the
rules of the protocol it must find a fault.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest


class Rules(NamedTuple):
    """What the protocol relies on; each can be broken."""

    n_cells: int = 2
    n_slots: int = 4
    waits_for_inputs: bool = True
    waits_for_results: bool = True
    waits_for_copies: bool = True
    waits_at_the_end: bool = True
    publishes_last: bool = True
    n_headers: int = 2
    looks_before_it_writes: bool = True
    waits_for_the_node: bool = True


_KEPT = Rules()


class Step(NamedTuple):
    """`kind`: "write" or "read" (a place and a value), "publish" or "await" (a word and a number)."""

    kind: str
    at: tuple[object, ...]
    value: object


class Rank:
    """The steps of rank *me* of *n*."""

    def __init__(self, me: int, n: int, rules: Rules) -> None:
        self.me, self.n, self.rules = me, n, rules
        self.steps: list[Step] = []
        self.chunks = self.calls = 0

    def others(self) -> list[int]:
        return [rank for rank in range(self.n) if rank != self.me]

    def write(self, *at: object, value: object) -> None:
        self.steps.append(Step("write", at, value))

    def read(self, *at: object, value: object) -> None:
        self.steps.append(Step("read", at, value))

    def publish(self, word: str, number: int) -> None:
        self.steps.append(Step("publish", (word, self.me), number))

    def wait(self, word: str, rank: int, number: int) -> None:
        self.steps.append(Step("await", (word, rank), number))

    def filled(self, write: Sequence[Step], number: int) -> None:
        """Write, then publish; or, broken, the other way round."""
        if not self.rules.publishes_last:
            self.publish("published", number)
        self.steps += write
        if self.rules.publishes_last:
            self.publish("published", number)

    # -- the calls, as in the headers ----------------------------------------------------------------------------

    def cells(self, *declining: int) -> None:
        """A sum in cells, of which the ranks *declining* take no part."""
        self._begin(1, declining)
        if self.me in declining:
            return
        cell = self.calls % self.rules.n_cells
        self.filled([Step("write", ("cell", self.me, cell), (self.me, self.calls))], self.chunks)
        if not self._look(self.chunks, declining):
            return
        for rank in range(self.n):
            self.read("cell", rank, cell, value=(rank, self.calls))

    def boxes(self, n_chunks: int, *declining: int) -> None:
        """The same in boxes."""
        self._begin(n_chunks, declining)
        if self.me in declining:
            return
        first = self.chunks - n_chunks + 1
        for i in range(n_chunks + 2):
            if i < n_chunks:
                self._put(first + i)
            if i == 1 and not self._look(first, declining):
                return
            if 1 <= i <= n_chunks:
                self._reduce(first + i - 1)
            if i >= 2:
                self._take(first + i - 2)

    def _begin(self, n_chunks: int, declining: Sequence[int]) -> None:
        """Say what this rank does in the call; if it declines, all of that."""
        self.calls += 1
        self.chunks += n_chunks
        self.write("header", self.me, self.calls % self.rules.n_headers, value=(self.calls, self.me in declining))
        if self.me in declining:
            self._skip()

    def _look(self, number: int, declining: Sequence[int]) -> bool:
        """Look what the others do in the call, whose first chunk is *number*; return whether all take part."""
        for rank in self.others():
            if self.rules.waits_for_inputs:
                self.wait("published", rank, number)
            if rank in declining and not self.rules.looks_before_it_writes:
                continue
            self.read("header", rank, self.calls % self.rules.n_headers, value=(self.calls, rank in declining))
            if rank in declining:
                self._skip()
                return False
        return True

    def _skip(self) -> None:
        """Take no further part; the node sums what all ranks then push to it."""
        self.publish("reduced", self.chunks)
        self.publish("published", self.chunks)
        self.publish("pushed", self.calls)
        for rank in self.others():
            if self.rules.waits_for_the_node:
                self.wait("pushed", rank, self.calls)

    def _slot(self, number: int) -> int:
        return number % self.rules.n_slots

    def _put(self, number: int) -> None:
        self.filled([Step("write", ("box", self.me, self._slot(number), owner), ("input", self.me, number))
                     for owner in self.others()], number)

    def _reduce(self, number: int) -> None:
        boxes = [("box", rank, self._slot(number), self.me) for rank in self.others()]
        for rank in self.others():
            if self.rules.waits_for_inputs:
                self.wait("published", rank, number)
        for rank, box in zip(self.others(), boxes):
            self.read(*box, value=("input", rank, number))
        for box in boxes:
            self.write(*box, value=("result", number))
        self.publish("reduced", number)

    def _take(self, number: int) -> None:
        for owner in self.others():
            if self.rules.waits_for_results:
                self.wait("reduced", owner, number)
            self.read("box", self.me, self._slot(number), owner, value=("result", number))

    def broadcast(self, root: int, n_chunks: int) -> None:
        """Of nothing that fits a cell: `bps_direct_meet`, then `bps_direct_copy_boxes`."""
        self.calls += 1
        self.chunks += 1
        self.publish("reduced", self.chunks)
        self.publish("published", self.chunks)
        for rank in self.others():
            self.wait("published", rank, self.chunks)
        before = self.chunks
        for number in range(before + 1, before + n_chunks + 1):
            # a part for each owner, as in sums: the whole of a box
            places = [("box", root, self._slot(number), owner) for owner in range(self.n) if owner != root]
            if self.me == root:
                if number - before > self.rules.n_slots and self.rules.waits_for_copies:
                    self._await_copies(number - self.rules.n_slots)
                self.filled([Step("write", place, ("copy", number)) for place in places], number)
            else:
                self.wait("published", root, number)
                for place in places:
                    self.read(*place, value=("copy", number))
                self.publish("reduced", number)
        self.chunks = before + n_chunks
        if self.me == root and self.rules.waits_at_the_end:
            self._await_copies(self.chunks)

    def gather(self, *given: int) -> None:
        """`bps_direct_exchange`: all give to all, or, of other bytes in the same places, each to each.

        *given*: by rank, in how many chunks it gives bytes. A rank waits for the others' first chunk, and for those
        with bytes.
        """
        n_chunks = max(given)
        self.calls += 1
        before, self.chunks = self.chunks, self.chunks + n_chunks
        self.write("header", self.me, self.calls % self.rules.n_headers, value=(self.calls, False))
        for i in range(n_chunks + 1):
            number = before + 1 + i
            if i < n_chunks:
                if i >= self.rules.n_slots and self.rules.waits_for_copies:
                    self._await_copies(number - self.rules.n_slots)
                self.filled([Step("write", ("box", self.me, self._slot(number), owner), ("copy", self.me, number))
                             for owner in self.others() if i < given[self.me]], number)
            if i > 0:
                for rank in self.others():
                    if i > 1 and i > given[rank]:
                        continue
                    if self.rules.waits_for_inputs:
                        self.wait("published", rank, number - 1)
                    if i == 1:
                        self.read("header", rank, self.calls % self.rules.n_headers, value=(self.calls, False))
                    if i <= given[rank]:
                        self.read("box", rank, self._slot(number - 1), self.me, value=("copy", rank, number - 1))
                self.publish("reduced", number - 1)
        if self.rules.waits_at_the_end:
            self._await_copies(self.chunks)

    def _await_copies(self, number: int) -> None:
        for rank in self.others():
            self.wait("reduced", rank, number)


def fault(n: int, calls: Sequence[tuple[object, ...]], rules: Rules = _KEPT) -> str:
    """Try all orders; return the first fault, "" if there is none."""
    programs = []
    for me in range(n):
        rank = Rank(me, n, rules)
        for name, *arguments in calls:
            getattr(rank, str(name))(*arguments)
        programs.append(rank.steps)
    start = (0,) * n
    seen = {(start, frozenset())}
    todo = [(start, dict[tuple[object, ...], object]())]
    while todo:
        at, memory = todo.pop()
        moved = False
        for rank in range(n):
            if at[rank] == len(programs[rank]):
                continue
            step = programs[rank][at[rank]]
            if step.kind == "await" and memory.get(step.at, 0) < step.value:  # type: ignore[operator]
                continue
            moved = True
            if step.kind == "read" and memory.get(step.at) != step.value:
                return f"rank {rank} finds {memory.get(step.at)} in {step.at}, not {step.value}"
            after = memory if step.kind in ("await", "read") else memory | {step.at: step.value}
            following = (*at[:rank], at[rank] + 1, *at[rank + 1:])
            key = following, frozenset(after.items())
            if key not in seen:
                seen.add(key)
                todo.append((following, after))
        if not moved and any(at[rank] < len(program) for rank, program in enumerate(programs)):
            return f"all wait: {[program[i] for program, i in zip(programs, at) if i < len(program)]}"
    return ""


def mixes(n: int) -> Iterator[tuple[tuple[object, ...], ...]]:
    """Every sequence of three kinds of calls."""
    kinds: list[tuple[object, ...]] = [("cells",), ("boxes", 1), ("broadcast", 0, 1), ("broadcast", n - 1, 1),
                                       ("gather", *[1] * n)]
    yield from itertools.product(kinds, repeat=3)


def test_cells_of_two_ranks():
    assert fault(2, [("cells",)] * 4) == ""


def test_cells_of_three_ranks():
    assert fault(3, [("cells",)] * 4) == ""


@pytest.mark.parametrize("n_slots", [3, 4])
def test_boxes_of_two_ranks(n_slots):
    assert fault(2, [("boxes", 4), ("boxes", 1)], Rules(n_slots=n_slots)) == ""


def test_boxes_of_three_ranks():
    assert fault(3, [("boxes", 1)] * 2) == ""


@pytest.mark.thorough
def test_chunks_of_three_ranks():
    assert fault(3, [("boxes", 4)]) == ""


@pytest.mark.parametrize("calls", list(itertools.product(
    [("cells",), ("cells", 0), ("cells", 1), ("boxes", 1), ("boxes", 2, 0), ("boxes", 1, 0, 1)], repeat=3)), ids=str)
def test_two_ranks_of_which_some_decline(calls):
    assert fault(2, calls) == ""


@pytest.mark.parametrize("calls", [
    [("cells", 0), ("cells",), ("cells", 2)], [("cells", 1), ("cells", 0, 2), ("cells",)],
    [("boxes", 1, 1), ("boxes", 1)]], ids=str)
def test_three_ranks_of_which_some_decline(calls):
    assert fault(3, calls) == ""


def test_one_box_serves_calls_of_one_chunk():
    assert fault(2, [("boxes", 1)] * 4, Rules(n_slots=1)) == ""


def test_copies_of_two_ranks():
    assert fault(2, [("broadcast", 0, 6), ("broadcast", 1, 2), ("broadcast", 0, 1)]) == ""


def test_exchanges_of_two_ranks():
    assert fault(2, [("gather", 6, 6), ("gather", 1, 6), ("gather", 6, 0), ("boxes", 2)]) == ""


def test_exchanges_of_three_ranks():
    assert fault(3, [("gather", 1, 1, 0), ("gather", 1, 0, 1)]) == ""


@pytest.mark.parametrize("calls", list(mixes(2)), ids=str)
def test_calls_of_all_kinds_follow_each_other(calls):
    assert fault(2, calls) == ""


@pytest.mark.parametrize("n, calls, broken", [
    (2, [("cells",)] * 4, Rules(n_cells=1)),
    (2, [("cells",)] * 4, Rules(waits_for_inputs=False)),
    (2, [("cells",)] * 4, Rules(publishes_last=False)),
    (2, [("boxes", 4)], Rules(n_slots=2)),
    (2, [("boxes", 4)], Rules(waits_for_inputs=False)),
    (2, [("boxes", 4)], Rules(waits_for_results=False)),
    (2, [("boxes", 4)], Rules(publishes_last=False)),
    (2, [("broadcast", 0, 6)], Rules(waits_for_copies=False)),
    (2, [("broadcast", 0, 2), ("boxes", 1)], Rules(n_slots=1, waits_at_the_end=False)),
    (2, [("gather", 6, 0)], Rules(waits_for_copies=False)),
    (2, [("gather", 2, 2)], Rules(waits_for_inputs=False)),
    (2, [("gather", 2, 2)], Rules(publishes_last=False)),
    (2, [("gather", 2, 2), ("gather", 2, 2)], Rules(n_slots=2, waits_at_the_end=False)),
    (3, [("cells",)] * 3, Rules(n_cells=1)),
    (2, [("cells",)] * 3, Rules(n_headers=1)),
    (2, [("cells", 0), ("cells",)], Rules(looks_before_it_writes=False)),
    (2, [("boxes", 2, 1), ("boxes", 2)], Rules(looks_before_it_writes=False)),
    (2, [("cells", 0), ("cells", 0), ("cells",)], Rules(waits_for_the_node=False)),
], ids=lambda value: str(value)[:60])
def test_a_rule_that_is_left_out_is_noticed(n, calls, broken):
    assert fault(n, calls, broken) != ""
