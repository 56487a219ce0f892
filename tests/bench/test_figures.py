"""The simulated figures keep their promises; calibration finds a minimum."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from bpsfast.bench.paper import claim_tables, expr3, osdi20
from bpsfast.bench.paper.calibration import Fit, least, mean_error
from bpsfast.bench.paper.figures import Constants, Row, figure_12, figure_13, figures_15_16

RESULT = Path(expr3.__file__).parents[1] / "results" / "expr3.json"


@pytest.fixture(scope="module")
def constants() -> Constants:
    """Return the constants of the committed run of ``make expr3``."""
    fits = {fit["name"]: fit["value"] for fit in json.loads(RESULT.read_text())["calibration"]}
    wire = {name: fits[name] for name in ("ring_overhead_s", "message_overhead_s", "server_rate")}
    return Constants(**wire, framework=tuple((name, fits[name]) for name in ("TensorFlow", "MXNet", "PyTorch")))


@pytest.mark.thorough
@pytest.mark.slow
def test_efficiencies_at_256_gpus_are_within_five_points(constants: Constants) -> None:
    rows = figures_15_16(constants, scales=(32,))
    assert len(rows) == 22 and mean_error(rows) < 0.05


@pytest.mark.thorough
@pytest.mark.slow
def test_figure_13_is_predicted_within_006_on_average(constants: Constants) -> None:
    rows = figure_13(constants)
    assert len(rows) == 36 and mean_error(rows) < 0.06


@pytest.mark.slow
def test_figure_12_rises_with_helpers_as_measured(constants: Constants) -> None:
    ours = [row for row in figure_12(constants) if row.of == "BytePS"]
    assert [row.simulated for row in ours] == sorted(row.simulated for row in ours)
    assert all(abs(row.error) < 0.06 * row.paper for row in ours)


def test_the_committed_result_is_of_this_code(constants: Constants) -> None:
    kept = {(cell["of"], cell["at"]): cell["simulated"] for cell in json.loads(RESULT.read_text())["cells"]
            if cell["figure"] == "15/16"}
    for row in figures_15_16(constants, scales=(4,), systems=lambda system: system == "all-reduce"):
        assert row.simulated == pytest.approx(kept[row.of, row.at], rel=1e-9)


def test_least_finds_the_bottom_of_a_curve() -> None:
    assert least(lambda x: abs(x - 0.3), 0.0, 1.0) == pytest.approx(0.3, abs=0.01)
    assert least(lambda x: x, 2.0, 3.0) == 2.0


def test_tables_show_every_cell_with_its_error() -> None:
    rows = [Row(figure, "a", at, 1.0, 1.5, "x") for figure in expr3._TITLES for at in ("k=1", "256 GPUs")]
    text = expr3.tables([Fit("f", 1.0, "s", "12", 1, 0.1)], rows, [claim_tables.Point("m", g, 0, 0, 0)
                                                                   for g in claim_tables.SWEEP_GBITS],
                        [claim_tables.Size(2, 1, 1, 1, 3)])
    assert text.count("1.00 / 1.50 (+0.50)") == 2 * len(expr3._TITLES)


def test_the_papers_figures_are_whole() -> None:
    assert all(len(curve) == 9 for curve in (*osdi20.FIGURE_12.values(), *osdi20.FIGURE_13.values()))
    assert sum(len(job.efficiency) for job in osdi20.JOBS) == 22
