"""make expr2: the twelve bars of figure 14 in the paper's order, within the stated tolerance; files; exit status."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bpsfast.bench.paper import expr2, figure_14
from bpsfast.bench.paper.figures import Row
from bpsfast.orchestration.errors import ConfigError

pytest.importorskip("scipy", reason="scipy is not installed")
RESULT = expr2.RESULTS / "expr2.json"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return figure_14.figure_14(expr2.constants(expr2.RESULTS / "expr3.json"))[0]


@pytest.mark.slow
def test_all_bars_are_in_the_papers_order(rows: list[Row]) -> None:
    assert len(rows) == 12 and all(figure_14.in_order(rows).values())
    bars = {(row.of, row.at): row.simulated for row in rows}
    for model in ("gpt2", "ugatit"):
        assert 1.0 < bars[f"PCIe {model}", "strawman"] < bars[f"PCIe {model}", "CPU-assisted"]
        zero, both, two, all_roots = (bars[f"NVLink {model}", f"root = {at}"] for at in ("0", "2,3", "2", "all"))
        assert 1.0 < zero < all_roots < two and both == pytest.approx(two, rel=0.005)


@pytest.mark.slow
def test_all_bars_have_their_size(rows: list[Row]) -> None:
    assert all(abs(row.simulated / row.paper - 1) <= 0.10 for row in rows)
    assert [row for row in rows if not figure_14.has_size(row)] == []


@pytest.mark.slow
def test_the_committed_result_is_of_this_code(rows: list[Row]) -> None:
    kept = {(cell["of"], cell["at"]): cell["simulated"] for cell in json.loads(RESULT.read_text())["cells"]}
    assert {(row.of, row.at): row.simulated for row in rows} == pytest.approx(kept, rel=1e-6)


def wrong(constants: object) -> tuple[list[Row], list]:
    return [Row("14", "PCIe gpt2", "strawman", 1.04, 1.3, "x"), Row("14", "PCIe gpt2", "CPU-assisted", 1.14, 1.2, "x")
            ], []


def test_a_wrong_order_is_told_and_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_14, "figure_14", wrong)
    done = CliRunner().invoke(expr2.main, ["--out", str(tmp_path)])
    assert done.exit_code == 1 and "not in the paper's order: PCIe gpt2, strawman; PCIe gpt2" in done.output
    told = (tmp_path / "expr2.md").read_text()
    assert "| PCIe gpt2 | strawman | 1.04 | 1.300 | +25.0 % | **no** | **no** |" in told
    cells = json.loads((tmp_path / "expr2.json").read_text())["cells"]
    assert [(cell["in_order"], cell["has_size"]) for cell in cells] == [(False, False), (False, True)]


def test_the_right_order_is_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure_14, "figure_14", lambda constants: (
        [Row("14", "PCIe gpt2", "strawman", 1.04, 1.1, "x"), Row("14", "PCIe gpt2", "CPU-assisted", 1.14, 1.2, "x")],
        []))
    assert CliRunner().invoke(expr2.main, ["--out", str(tmp_path)]).exit_code == 0


def test_without_expr3_it_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run make expr3 first"):
        expr2.constants(tmp_path / "expr3.json")


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (bpsfast[plot])")
    expr2.plot(wrong(None)[0], tmp_path / "expr2.png")
    assert (tmp_path / "expr2.png").stat().st_size > 10_000
