"""The order of bars, and the number that is fitted for each model."""
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from bpsfast.bench.paper import osdi20
from bpsfast.bench.paper.figure_14 import BARS, fitted, has_size, in_order, pairs_in_order
from bpsfast.bench.paper.figures import Constants, Row, run


def row(at: str, measured: float, simulated: float, of: str = "a") -> Row:
    return Row("14", of, at, measured, simulated, "x")


def test_every_bar_of_the_paper_has_a_way() -> None:
    assert sum(map(len, osdi20.FIGURE_14.values())) == 12
    assert all(BARS[machine].ways.keys() == bars.keys() for (machine, _), bars in osdi20.FIGURE_14.items())


@pytest.mark.parametrize(("simulated", "right"), [
    ((1.1, 1.2, 1.2), (True, True, True)),
    ((1.1, 1.2, 1.203), (True, True, True)),  # about equal
    ((1.1, 1.2, 1.25), (True, False, False)),
    ((1.3, 1.2, 1.2), (False, False, False)),
    ((0.99, 1.2, 1.2), (False, True, True)),  # slower than all-reduce
])
def test_order(simulated: tuple[float, ...], right: tuple[bool, ...]) -> None:
    rows = [row(str(n), measured, value) for n, (measured, value) in enumerate(zip((1.02, 1.13, 1.13), simulated))]
    assert tuple(in_order([*rows, row("other", 9.0, 0.5, "b")])[each.of, each.at] for each in rows) == right


def test_pairs_of_all_bars_count() -> None:
    rows = [row("0", 1.1, 1.1), row("1", 1.2, 1.3), row("2", 1.3, 1.2, "b")]
    assert pairs_in_order(rows) == (2, 3)


@given(st.floats(0.5, 3.0), st.floats(-0.3, 0.3))
def test_size(measured: float, error: float) -> None:
    if abs(abs(error) - 0.1) > 1e-9:
        assert has_size(row("0", measured, measured * (1 + error))) is (abs(error) < 0.1)


def test_computing_is_what_all_reduces_efficiency_needs() -> None:
    constants = Constants(ring_overhead_s=2e-5, framework=(("PyTorch", 5e-11),))
    work, fit = fitted("gpt2", constants)
    found = run("all-reduce", work, 8, 0, constants, framework="PyTorch")
    assert found.efficiency == pytest.approx(0.83, abs=0.005) and fit.value == work.compute_s and fit.residual < 0.005
