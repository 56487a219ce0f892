"""make expr1: tables and plot from the records of bench optimum, compared with the paper's figure."""
from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bpsfast.bench.harness import result_file
from bpsfast.bench.paper import expr1
from bpsfast.launch.namespaces import netns


def record(contestant: str, k: int, time: float, formula: float | None, void: bool = False) -> dict[str, Any]:
    return {"section": "8 workers, equal links",
            "chosen": {"contestant": contestant, "n_workers": 8, "n_helpers": k, "load": "numpy", "nbytes": 96 << 15,
                       "rate_bits": 8e6, "partition_nbytes": 1 << 15, "credit_nbytes": 1 << 16},
            "measured": {"time": time, "formula": formula, "dev": formula and time / formula - 1, "void": void,
                         "rates_bytes": [1e6] * (8 + k)}}


RECORDS = [record("optimal", 0, 1.785, 1.75), record("gloo", 0, 1.9, 1.75), record("optimal", 8, 1.05, 1.0),
           record("ps", 8, 1.1, 1.0, void=True), record("hash:mixed", 8, 1.3, None)]


def test_cells_show_what_was_measured_the_formula_and_what_is_void():
    text = expr1.tables({"8": RECORDS})
    assert "| 0 | numpy | 1.785 / 1.750 (+2.0 %) | 1.900 / 1.750 (+8.6 %) |  |  |" in text
    assert "| 8 | numpy | 1.050 / 1.000 (+5.0 %) |  | 1.100 / 1.000 (+10.0 %) void | 1.300 |" in text
    assert "| 0 | 0.953 | 0.980 |" in text and "| 8 | 0.956 | 0.952 |" in text


def test_plan_and_simulator_stand_beside_what_was_not_void():
    text = expr1.tables({"8": RECORDS})
    rows = [line for line in text.split("## What was predicted")[1].splitlines() if line.startswith("| 8 workers")]
    assert [row.split(" | ")[3] for row in rows] == ["ours", "gloo's ring", "ours", "hash:mixed"]
    assert rows[1].endswith("| 1.900 | 1.750 (+8.6 %) |  |") and "| 1.300 |  | " in rows[3]
    assert "planned: 3 cells, mean deviation" in text and "simulated: 3 cells, mean deviation" in text
    assert 1.75 <= expr1.planned(RECORDS[0]) < 1.75 * 1.1
    assert 1.75 * 0.9 < expr1.simulated(RECORDS[0]) < 1.75 * 1.3, "a burst of 160 KiB is a share of 3 MiB"


def test_what_the_paper_reached_is_its_goodput_over_the_optimum():
    assert expr1.reached(8, 0) == pytest.approx(49 / (90 / 1.75))
    assert expr1.reached(8, 8) == pytest.approx(86 / 90)


def test_results_of_an_earlier_run_are_read_without_their_manifest(tmp_path):
    path = tmp_path / "optimum_8.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [{"bench": "optimum"}, *RECORDS]))
    assert result_file.records(path) == RECORDS


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (bpsfast[plot])")
    expr1.plot({"8": RECORDS}, tmp_path / "expr1.png")
    assert (tmp_path / "expr1.png").stat().st_size > 10_000


def test_without_root_it_says_so_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    result = CliRunner().invoke(expr1.main, ["--out", str(tmp_path)])
    assert result.exit_code == 3 and "network namespaces need root" in result.output
    assert not list(tmp_path.iterdir())
