"""bench suite: verdicts for figures, and one report of benches that run, cannot run, and fail."""
from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from bpsfast.bench import codecs, suite
from bpsfast.bench.harness import plots
from bpsfast.bench.suite import page, pieces, verdicts
from bpsfast.bench.suite.pieces import Outcome, Piece
from bpsfast.cli import cli
from bpsfast.orchestration.errors import ConfigError, PeerLostError
from tests.support.curve_records import record, turns


def found(*records, name="push_pull"):
    return {each.question: each for each in verdicts.judge([Outcome(name, records=list(records))])}


def test_cliffs_are_a_verdict():
    before, after = turns(1000, *[1.0] * 9), turns(2000, *[4.0] * 5, *[2.0] * 4)
    verdict = found(before, after)["cliffs"]
    assert verdict.is_good is False and "not certain, of more turns: by size: numpy: goodput" in verdict.answer
    certain = found(before, turns(2000, *[4.0] * 9))["cliffs"]
    assert certain.is_good is False and "not certain" not in certain.answer
    falls = record(1000, 1.0, bound=1e4), record(2000, 4.0, bound=5e3)
    assert found(*falls)["cliffs"] == verdicts.Verdict(
        "cliffs", "none in 1 curves (goodput, p99, CPU per byte); where the possible falls, too: 3", True)


def test_verdicts_of_one_machine():
    good = found(record(1 << 20, 1.0, efficiency=None), record(1 << 21, 1.0, efficiency=0.9))
    assert "memory limits it" in good["push_pull, one machine"].answer and good["push_pull, one machine"].is_good
    assert good["wrong results"].is_good and good["cliffs"].is_good
    bad = found(record(1 << 20, 1.0, efficiency=0.3, n_wrong=2), record(1 << 21, 9.0, efficiency=0.3))
    assert not any(bad[name].is_good for name in ("push_pull, one machine", "wrong results", "cliffs"))
    assert "2 in 2 rows" in bad["wrong results"].answer
    assert "numpy: goodput is 0.22 times as good at" in bad["cliffs"].answer
    assert "numpy: p99 per byte is 0.22" in bad["cliffs"].answer


def test_nothing_is_said_of_nodes_whose_bound_nobody_knows():
    rows = [record(1 << 20, 1.0, section="loopback", efficiency=None), record(1 << 21, 1.0, section="links of 1gbit")]
    assert not [name for name in found(*rows, name="push_pull_nodes") if name.startswith("push_pull")]


def test_rows_that_nobody_checked_are_not_called_right():
    unchecked = [record(8, 1.0, "memory of numpy"), record(8, 1.0, "numpy, sums off", n_wrong=8),
                 record(8, 1.0, "raw 2 small", "raw")]
    verdict = found(*unchecked)["wrong results"]
    assert verdict.is_good is None and verdict.answer == "no row was checked"
    assert found(*unchecked, record(8, 1.0))["wrong results"].answer == "0 in 1 rows that were checked"
    assert found(record(8, 1.0, losses_alike=False), name="ddp")["wrong results"].is_good is False


@pytest.mark.parametrize(("section", "busy", "efficiency", "word", "is_good"), [
    ("loopback", 0.95, 0.95, "the CPU limits it", None), ("links", 0.95, 0.5, "the CPU limits it", None),
    ("links", 0.95, 0.95, "the network limits it", True), ("links", 0.2, 0.5, "neither is full", False)])
def test_verdicts_of_two_nodes(section, busy, efficiency, word, is_good):
    row = record(10**9, 2.0, section=section, cpu_busy=[busy], efficiency=efficiency)
    verdict = found(row, name="push_pull_nodes")[f"push_pull, two nodes, {section}"]
    assert verdict.answer.endswith(word) and verdict.is_good is is_good
    assert "4.00 Gbit/s" in verdict.answer and "2.00 CPU s/GB" in verdict.answer


def test_a_server_s_limit_is_the_lesser_of_memory_and_cores():
    def row(n_threads, bits, core_bits):
        chosen = {"operation": "sum, fused", "dtype": "float32", "n_threads": n_threads}
        return {"section": "summation", "chosen": chosen, "measured":
                {"bits": bits, "core_bits": core_bits, "traffic": 1.25}}

    text = found(row(1, 50e9, 50e9), row(4, 60e9, 50e9), name="summation")["a server's limit"].answer
    assert "memory bandwidth, at a card of 23 Gbit/s" in text
    text = found(row(1, 5e9, 5e9), row(4, 60e9, 5e9), name="summation")["a server's limit"].answer
    assert "its cores, at a card of 20 Gbit/s" in text


def test_cells_of_the_formula_that_are_void_do_not_count():
    def cell(dev, void):
        return {"section": "x", "chosen": {"contestant": "optimal"},
                "measured": {"formula": 1.0, "dev": dev, "void": void}}

    assert found(cell(0.1, False), cell(5.0, True), name="optimum")["the formula"].is_good
    assert not found(cell(0.3, False), name="optimum")["the formula"].is_good
    assert "all void" in found(cell(5.0, True), name="optimum")["the formula"].answer


@pytest.mark.slow
def test_one_report_of_what_ran_could_not_and_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite, "PIECES", (
        Piece("codecs", "codecs", {"n_rounds": 1}),
        Piece("post", "post", {"n_nodes": 3}),
        Piece("schedule", "schedule", lacking=lambda: "no <machines>")))
    assert not suite.run({"folder": str(tmp_path / "out"), "quick": True}), "a bench failed"
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    states = {each["name"]: each["state"] for each in document["benches"]}
    assert states["codecs"] == "done" and states["schedule"] == "not here: no <machines>"
    assert states["post"].startswith("ConfigError: ") and document["verdicts"][0]["is_good"]
    assert (tmp_path / "out" / "codecs.jsonl").exists()
    text = (tmp_path / "out" / "report.html").read_text()
    assert "no &lt;machines&gt;" in text and "onebit" in text and not re.search(r'(src|href)="(?!data:)', text)
    shown = capsys.readouterr().out
    assert "== codecs" in shown and max(map(len, shown.split("bpsfast bench suite")[1].splitlines()[:-1])) <= 80
    assert suite.run({"folder": str(tmp_path / "out"), "quick": True, "only": "codecs"})
    assert not suite.run({"folder": str(tmp_path / "out"), "quick": True, "only": "schedule"}), "nothing has run"


def test_of_a_rank_s_traceback_the_last_line_is_told_and_the_whole_is_kept(tmp_path, capsys, monkeypatch):
    def failing(options):
        print("a table")
        raise PeerLostError("bpsfast failed in measure('numpy', 4):\nTraceback (most recent call last):\n"
                            "  File \"x\"\nMemoryError: no room")

    monkeypatch.setattr(codecs, "run", failing)
    outcome = pieces.run(Piece("codecs", "codecs"), True, tmp_path)
    assert outcome.is_failed
    assert outcome.state == "PeerLostError: bpsfast failed in measure('numpy', 4): MemoryError: no room"
    for text in (outcome.text, capsys.readouterr().out):
        assert text.startswith("a table\n") and '  File "x"\n' in text


def test_curves_are_drawn_into_the_page(monkeypatch):
    outcome = Outcome("push_pull", records=[record(8, 1.0), record(16, 1.5)], text="<table>")
    machine = {"cpu": "X", "n_threads": 2, "n_usable": 2, "memory_nbytes": 2**30, "load_average": [0.1], "versions": {}}
    monkeypatch.setattr(plots, "missing", lambda: "no plot: none")
    assert "no plot: none" in page.page("t", machine, [], [outcome])
    shown = page.page("t", machine, [], [Outcome("a", "not here: x"), Outcome("b", took_s=75.0)])
    assert '<td class=""></td><td>not here: x' in shown and ">75\N{NO-BREAK SPACE}s</td><td>done" in shown
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    text = page.page("t", machine, verdicts.judge([outcome]), [outcome])
    assert text.count("data:image/png;base64,") == 3 and "&lt;table&gt;" in text
    assert '<img alt="goodput, Gbit/s, by size: numpy"' in text


def test_names_of_the_suite_are_checked_and_benches_have_other_names(tmp_path):
    with pytest.raises(ConfigError, match="'x' is none of kernels"):
        suite.run({"folder": str(tmp_path), "only": "x"})
    for alias, name in (("transport", "post"), ("allreduce", "ddp"), ("compress", "codecs"), ("placement", "optimum")):
        shown = [CliRunner().invoke(cli, ["bench", each, "--help"]).output.split("\n", 1)[1] for each in (alias, name)]
        assert shown[0] == shown[1]
