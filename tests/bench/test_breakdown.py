"""make breakdown: bars of real packets from bench schedule's records, bars of 256 GPUs from the simulator, files."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bpsfast.bench.harness import result_file
from bpsfast.bench.paper import breakdown, expr2, simulated_breakdown as simulated
from bpsfast.launch.namespaces import netns

SAMPLES_S = {"DDP gloo": 8.0, "fifo, no credit": 6.4, "priority": 6.4, "priority, crossing": 5.0}


def row(way: str, step_s: float) -> dict[str, Any]:
    return {"section": "schedule",
            "chosen": {"way": way, "model": "vgg16", "divisor": 32, "nbytes": 17_000_000, "n_workers": 4,
                       "n_helpers": 2},
            "measured": {"samples_s": [step_s] * 3, "median_s": step_s, "alone_s": 4.0, "rate_bytes": 4e6, "n_wrong": 0,
                         "void": way == "priority"},
            "simulated": {"step_s": step_s * 1.25}}


@pytest.fixture
def records() -> list[dict[str, Any]]:
    bars = [simulated.Bar("vgg16", part.name, 0.5 - place / 20, 0.25) for place, part in enumerate(simulated.PARTS)]
    rows = [row(way, step_s) for way, step_s in reversed(SAMPLES_S.items())]  # in any order
    return [*breakdown.on_packets(rows), *breakdown.on_gpus(bars)]


def test_bars_follow_each_other_with_their_distance_to_linear_scaling(records: list[dict[str, Any]]) -> None:
    lines = breakdown.text(records).splitlines()
    assert "| all-reduce, FIFO | 8.00 | 10.00 | 1.00 | 50.0 % | 50.0 % |" in lines
    assert "| + priority and credit | 6.40 void: the CPU was the limit | 8.00 | 1.25 | 62.5 % | 37.5 % |" in lines
    assert "| + cross-barrier | 5.00 | 6.25 | 1.60 | 80.0 % | 20.0 % |" in lines
    assert [line for line in lines if line.startswith("| + ")] == lines[11:14], "in the order of the parts"
    assert lines[-1].startswith("| vgg16 | 50.0 % (50.0 %) | 55.6 % (44.4 %) | 62.5 % (37.5 %) | 71.4 % (28.6 %) |")


def test_it_is_redrawn_from_the_records(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (bpsfast[plot])")
    kept = tmp_path / "breakdown.jsonl"
    kept.write_text("".join(json.dumps(each) + "\n" for each in [{"bench": "breakdown"}, *records]))
    done = CliRunner().invoke(breakdown.main, ["--redraw", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "breakdown.md").read_text() == breakdown.text(records)
    assert (tmp_path / "breakdown.png").stat().st_size > 10_000
    assert len(result_file.read(kept).series) == len(breakdown.WAYS), "bpsfast compare sees the raw samples"


def test_what_is_missing_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = CliRunner().invoke(breakdown.main, ["--redraw", "--out", str(tmp_path)])
    assert nothing.exit_code == 2 and "run make breakdown first" in nothing.output
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    refused = CliRunner().invoke(breakdown.main, ["--out", str(tmp_path)])
    assert refused.exit_code == 3 and "network namespaces need root" in refused.output
    assert not list(tmp_path.iterdir())


def test_what_an_optimal_split_puts_on_a_card() -> None:
    # with n = 8 and k = 4 a training machine owns 4/88 of all sums, by the formula of section 4.1
    assert simulated.traffic(8, 4).service == pytest.approx(6 * 4 / 88)
    assert simulated.traffic(8, 8).service == 0 and simulated.traffic(8, 0).service == pytest.approx(6 / 8)


@pytest.mark.slow
def test_parts_add_up_on_gpus_and_none_is_better_than_linear() -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    bars = simulated.bars(expr2.constants(expr2.RESULTS / "expr3.json"), ["gpt2"])
    assert [bar.part for bar in bars] == [part.name for part in simulated.PARTS]
    shares = [bar.efficiency for bar in bars]
    assert all(share < 1 for share in shares)
    assert shares == pytest.approx(sorted(shares), abs=0.01) and shares[1] > shares[0] + 0.1
    kept = breakdown.RESULTS / "breakdown.jsonl"
    found = [each for each in map(json.loads, kept.read_text().splitlines()[1:]) if each["chosen"]["model"] == "gpt2"]
    assert [each["simulated"]["step_s"] for each in found] == pytest.approx([bar.step_s for bar in bars], rel=1e-6)
