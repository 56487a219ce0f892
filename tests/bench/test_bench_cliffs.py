"""Cliffs of curves over sizes: turn by turn, relative to the bound, with an interval."""
from __future__ import annotations

import pytest

from bpsfast.bench.push_pull import cliffs
from tests.support.curve_records import record, turns


def test_a_cliff_is_a_next_size_slower_than_allowed_per_byte():
    smooth = [record(1 << at, 1.25**at * 1e-6) for at in range(12)]  # cheaper per byte with each size
    assert cliffs.cliffs(cliffs.curves(smooth)) == []
    edge = [record(1000, 1.0), record(2000, 2.49), record(4000, 6.3)]
    steps = cliffs.cliffs(cliffs.curves(edge))
    assert {(step.quantity, step.from_nbytes, step.to_nbytes) for step in steps} == {
        (quantity, 2000, 4000) for quantity in ("goodput", "p99", "CPU")}
    assert steps[0].share == pytest.approx(2 * 2.49 / 6.3)
    only_cpu = [record(1000, 1.0), record(2000, 2.0, cpu_s=[4.0])]
    assert [step.quantity for step in cliffs.cliffs(cliffs.curves(only_cpu))] == ["CPU"]


def test_what_one_turn_of_three_suffered_is_no_cliff():
    def at(*turns_s):
        rows = [record(1000, 1.0, samples_s=[1.0] * 12), record(2000, 2.0, samples_s=[*turns_s] * 4)]
        for row in rows:
            row["chosen"]["n_per_round"], row["measured"]["p99_s"] = 4, max(row["measured"]["samples_s"])
            row["measured"]["cpu_s"] = row["measured"]["cpu_s"] * 3
        rows[1]["measured"]["samples_s"].sort()  # turns of four
        return [step.quantity for step in cliffs.cliffs(cliffs.curves(rows))]

    assert at(2.0, 2.0, 9.0) == []
    assert at(2.0, 9.0, 9.0) == ["goodput", "p99"]


def test_a_cliff_is_certain_if_it_stays_one_however_turns_are_drawn():
    before = turns(1000, *[1.0] * 9)
    [goodput, p99] = cliffs.cliffs(cliffs.curves([before, turns(2000, *[4.0] * 8, 3.9)]))
    assert goodput.is_certain and p99.is_certain and goodput.low <= goodput.share == 0.5 <= goodput.high < 0.53
    two_ways = [before, turns(2000, *[4.0] * 5, *[2.0] * 4)]
    [goodput, p99] = cliffs.cliffs(cliffs.curves(two_ways))
    assert goodput.is_ours and not goodput.is_certain and (goodput.low, goodput.high) == (0.5, 1.0)
    assert str(goodput).endswith("goodput is 0.50 (0.50 to 1.00) times as good at 2000 B as at 1000 B")
    assert str(cliffs.cliffs(cliffs.curves(two_ways))) == str([goodput, p99])  # deterministic


def test_few_turns_make_no_cliff_certain():
    for n in (2, 5, 6):
        steps = cliffs.cliffs(cliffs.curves([turns(1000, *[1.0] * n), turns(2000, *[9.0] * n)]))
        assert len(steps) == 2 and all(step.is_ours and step.is_certain is (n == 6) for step in steps)
    goodput, *_ = cliffs.cliffs(cliffs.curves([turns(1000, 1.0, 1.0), turns(2000, 9.0, 9.0)]))
    assert str(goodput).endswith("goodput is 0.22 times as good at 2000 B as at 1000 B")


def test_nothing_is_certain_where_turns_are_not_known():
    steps = cliffs.cliffs(cliffs.curves([record(1000, 1.0), record(2000, 9.0)]))
    assert [step.quantity for step in steps] == ["goodput", "p99", "CPU"]
    assert all(step.is_ours and not step.is_certain for step in steps)


def test_a_turn_whose_cpu_time_is_not_known_hides_no_cliff():
    before, after = turns(1000, *[1.0] * 9), turns(2000, *[2.0] * 9)
    after["measured"]["cpu_s"] = [4e-6] * 8 + [-1e-9]
    assert [(step.quantity, step.share) for step in cliffs.cliffs(cliffs.curves([before, after]))] == [
        ("CPU", pytest.approx(0.5))]
    before["measured"]["cpu_s"] = [1e-6] * 8 + [0.0]
    after["measured"]["cpu_s"] = [2e-6] * 9
    assert cliffs.cliffs(cliffs.curves([before, after])) == []


def test_percentiles_of_as_many_samples_are_compared():
    def at(nbytes, n, worst_s):
        """Return nine turns of *n* samples, of which every fourth is slow."""
        row = record(nbytes, 1e-6 * nbytes, samples_s=[*[1e-6 * nbytes] * 3, worst_s] * (9 * n // 4))
        row["chosen"]["n_per_round"], row["measured"]["cpu_s"] = n, [1e-9 * nbytes] * 9
        return row

    rare = at(1000, 8, 1e-3)
    rare["measured"]["samples_s"][3::8] = [4e-3] * 9  # the worst of eight, and of every other four
    assert cliffs.cliffs(cliffs.curves([rare, at(2000, 4, 4e-3)])) == []
    [p99] = cliffs.cliffs(cliffs.curves([at(1000, 8, 1e-3), at(2000, 4, 8e-3)]))
    assert p99.quantity == "p99" and p99.share == pytest.approx(2 / 8, rel=0.1)


def test_a_cliff_of_the_possible_is_not_ours():
    def at(bound, median_s):
        return [record(1000, 1.0, bound=1e4), record(2000, median_s, bound=bound)]

    [goodput, p99, cpu] = cliffs.cliffs(cliffs.curves(at(bound=5e3, median_s=4.0)))  # both twice as slow per byte
    assert goodput.share == goodput.possible == 0.5 and not (goodput.is_ours or p99.is_ours or cpu.is_ours)
    assert str(goodput).endswith("is 0.50 times as good at 2000 B as at 1000 B, the possible 0.50 times: 1.00 of it")
    assert all(step.is_ours for step in cliffs.cliffs(cliffs.curves(at(bound=5e3, median_s=5.1))))
    [step, *_] = cliffs.cliffs(cliffs.curves(at(bound=4e4, median_s=2.6)))  # the bound improves
    assert step.possible == 1 and step.is_ours and str(step).endswith("as at 1000 B")


def test_turns_of_one_round_are_compared():
    """A machine that is half as fast in some rounds is so at both sizes."""
    slow = [1.0, 2.0] * 4
    assert cliffs.cliffs(cliffs.curves([turns(1000, *slow), turns(2000, *(2.2 * each for each in slow))])) == []
    steps = cliffs.cliffs(cliffs.curves([turns(1000, *slow), turns(2000, *(4 * each for each in slow))]))
    assert [(step.low, step.high) for step in steps] == [(0.5, 0.5)] * 2


def test_the_possible_is_that_of_the_same_round():
    before, after = turns(1000, *[1.0] * 9), turns(2000, *[2.0, 4.0, 4.0] * 3)
    before["measured"]["bound_s"], after["measured"]["bound_s"] = [0.5] * 9, [1.0, 2.0, 2.0] * 3
    steps = cliffs.cliffs(cliffs.curves([before, after]))
    assert [(step.share, step.possible, step.is_ours, step.low, step.high) for step in steps] == [
        (0.5, 0.5, False, 1.0, 1.0)] * 2
    after["measured"]["bound_s"] = [1.0] * 9
    assert all(step.is_ours and not step.is_certain for step in cliffs.cliffs(cliffs.curves([before, after])))


def test_a_possible_that_falls_in_some_rounds_makes_a_cliff_uncertain():
    before, after = turns(1000, *[1.0] * 9), turns(2000, *[3.0] * 9)
    before["measured"]["bound_s"], after["measured"]["bound_s"] = [0.5] * 9, [1.0] * 5 + [2.0] * 4
    steps = cliffs.cliffs(cliffs.curves([before, after]))
    assert [(step.possible, step.is_ours, step.is_certain) for step in steps] == [(1.0, True, False)] * 2
    assert all((step.low, step.high) == (pytest.approx(2 / 3), pytest.approx(4 / 3)) for step in steps)
    after["measured"]["bound_s"] = [0.8] * 9  # the bound improves by more than the size grows: no excuse
    assert all(step.possible == 1 and step.low == pytest.approx(2 / 3)
               for step in cliffs.cliffs(cliffs.curves([before, after])))


def test_the_possible_of_p99_is_its_rows_p99():
    """Samples that are slow in the memory row may be slow in ours."""
    def at(nbytes, worst_s, operation, **measured):
        row = record(nbytes, 1e-6 * nbytes, operation, samples_s=[*[1e-6 * nbytes] * 3, worst_s] * 9, **measured)
        row["chosen"]["n_per_round"], row["measured"]["cpu_s"] = 4, [1e-9 * nbytes] * 9
        return row

    ours = [at(nbytes, worst_s, "numpy", bounds=["memory of numpy"], bound_s=[1e-6 * nbytes] * 9)
            for nbytes, worst_s in ((1000, 2e-3), (2000, 8e-3))]
    [p99] = cliffs.cliffs(cliffs.curves(ours))  # without these rows
    assert p99.is_ours and p99.is_certain and p99.possible == 1
    memory = [at(nbytes, worst_s, "memory of numpy") for nbytes, worst_s in ((1000, 2e-3), (2000, 8e-3))]
    [p99] = cliffs.cliffs(cliffs.curves([*ours, *memory]))
    assert p99.quantity == "p99" and not p99.is_ours and p99.possible == pytest.approx(0.5, rel=0.05)
    for row in memory:  # which has more turns
        row["measured"]["samples_s"] = 2 * row["measured"]["samples_s"]
        row["measured"]["cpu_s"] = 2 * row["measured"]["cpu_s"]
    assert cliffs.cliffs(cliffs.curves([*ours, *memory])) == [p99]
    for row in ours:
        row["measured"]["bound_s"] = [None] * 9  # cores were moved before each turn
    assert [step.possible for step in cliffs.cliffs(cliffs.curves([*ours, *memory]))] == [1.0]


def test_only_turns_whose_possible_is_known_are_set_beside_it():
    before, after = turns(1000, *[1.0] * 12), turns(2000, *[2 / 0.3] * 6, *[2 / 0.7] * 6)
    before["measured"]["bound_s"] = [1.0] * 12
    after["measured"]["bound_s"] = [4.0] * 6 + [None] * 6
    for step in cliffs.cliffs(cliffs.curves([before, after])):
        assert (step.share, step.possible) == (pytest.approx(0.3), 0.5) and step.is_ours and step.is_certain
        assert step.low == step.high == pytest.approx(0.6)


def test_turns_between_which_the_cpus_were_moved_are_left_out():
    before, after = turns(1000, *[1.0] * 9), turns(2000, *[4.0] * 5, *[2.0] * 4)
    before["measured"]["handover_ns"], after["measured"]["handover_ns"] = [40.0] * 9, [190.0] * 5 + [45.0] * 4
    assert cliffs.cliffs(cliffs.curves([before, after])) == []
    before["measured"]["handover_ns"] = [190.0] * 5 + [40.0] * 4
    assert cliffs.cliffs(cliffs.curves([before, after]))
    after["measured"]["handover_ns"] = [0.0] * 9  # unknown
    assert cliffs.cliffs(cliffs.curves([before, after]))
    after["measured"]["handover_ns"] = [190.0] * 2 + [40.0] * 3 + [190.0] * 4  # two pairs are left
    assert all(step.high == float("inf") for step in cliffs.cliffs(cliffs.curves([before, after])))
    after["measured"]["handover_ns"] = [40.0] * 5 + [190.0] * 4  # none is
    steps = cliffs.cliffs(cliffs.curves([before, after]))
    assert steps and not any(step.is_certain for step in steps)


def test_others_and_rows_without_sums_are_no_curves_of_ours():
    rows = [record(nbytes, 1.0, operation, contestant) for nbytes in (8, 16) for operation, contestant in
            (("numpy", "bpsfast"), ("memory of numpy", "bpsfast"), ("numpy, sums off", "bpsfast"), ("gloo", "gloo"))]
    assert list(cliffs.curves(rows)) == ["by size: numpy"]
    assert len(cliffs.curves(rows, ours=False)) == 4
