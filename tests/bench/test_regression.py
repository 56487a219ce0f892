"""compare: reads all file formats, computes right intervals, refuses bad files with a reason; exit codes."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bpsfast.bench import regression
from bpsfast.bench.harness import result_file
from bpsfast.bench.harness.result_file import Series
from bpsfast.cli import cli
from bpsfast.orchestration.errors import ConfigError

RESULTS = Path(regression.__file__).parent / "results"
MACHINE = {"cpu": "X", "architecture": "x86_64", "n_threads": 2, "load_average": [0.5, 0, 0]}
RNG = np.random.default_rng(3)


def write(path, factors, bench="push_pull", machine=MACHINE, n_per_round=1, n=60):
    """Write a result file whose rows take 1 ms times their factor, with noise of a few percent."""
    manifest = {"bench": bench, "machine": machine, "options": {}}
    records = [{"section": "by size", "chosen": {"nbytes": nbytes, "dtype": "float32", "n_per_round": n_per_round},
                "measured": {"samples_s": list(1e-3 * factor * (1 + 0.02 * RNG.standard_normal(n)))}}
               for nbytes, factor in factors.items()]
    path.write_text("".join(json.dumps(each) + "\n" for each in [manifest, *records]))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(cli, ["compare", *arguments])


def test_rows_are_told_faster_slower_and_the_same(tmp_path):
    a = write(tmp_path / "a", {4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0})
    b = write(tmp_path / "b", {4: 1.0, 8: 1.3, 16: 0.7, 64: 1.0})
    done = run(a, b, "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert [row["verdict"] for row in found["rows"]] == ["the same", "slower", "faster"]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in found["rows"])
    assert found["only_before"] == ["by size: nbytes=32, float32"] and len(found["only_after"]) == 1
    assert run(a, b, "--json").output == done.output, "the same seed, the same draws"
    assert run(a, b, "--fail-on-slower").exit_code == 1
    assert run(b, b, "--fail-on-slower").exit_code == 0
    assert run(a, b, "--fail-on-slower", "--threshold", "0.5").exit_code == 0
    text = run(a, b).output
    assert "1 the same, 1 slower, 1 faster" in text and "only in A: 1 rows" in text
    assert "float32" not in text.split("\n")[1], "what all rows say"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("ns", "words"), [
    ((25.0, 180.0), "A 25 ns, B 180 ns; they share a cache in one only"), ((60.0, 25.0), "A 60 ns, B 25 ns\n"),
    ((None, 25.0), ""),
])
def test_cores_that_were_nearer_in_one_run_are_named(tmp_path, ns, words):
    paths = [write(tmp_path / name, {4: 1.0}, machine={**MACHINE, "handover_ns": each}) for name, each in zip("ab", ns)]
    text = run(*paths).output
    assert words in text if words else "cache line" not in text


def test_turns_are_drawn_whole():
    """If samples of a turn are equal, the interval is as wide as the few turns make it."""
    turns = [1.0, 2.0, 3.0, 4.0]
    alike = Series(tuple(value for value in turns for _ in range(50)), 50)
    loose = Series(alike.samples_s, 1)
    flat = Series((1.0,) * 200, 1)
    wide, narrow = (regression.compare({"x": flat}, {"x": each}).rows[0] for each in (alike, loose))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low) > 0


def test_an_interval_covers_the_truth_as_often_as_it_says():
    hits = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        a, b = (Series(tuple(rng.lognormal(0, 0.1, 80) * factor), 1) for factor in (1.0, 1.2))
        [row] = regression.compare({"x": a}, {"x": b}, confidence=0.9, seed=seed).rows
        hits += row.low <= 1.2 <= row.high
    assert 29 <= hits  # of 40; 36 are expected, 29 is 3.7 standard deviations less


def test_few_samples_show_nothing():
    [row] = regression.compare({"x": Series((1.0, 1.0), 1)}, {"x": Series((5.0, 5.0), 1)}).rows
    assert row.verdict == "unclear" and row.ratio == 5.0
    turns = {n: Series(tuple(np.linspace(1.0, 1.1, 50)) * n, 50) for n in (1, 2, 3)}
    longer = {n: Series(tuple(5 * value for value in each.samples_s), 50) for n, each in turns.items()}
    verdicts = [regression.compare({"x": turns[n]}, {"x": longer[n]}).rows[0].verdict for n in turns]
    assert verdicts == ["unclear", "unclear", "slower"], "samples of one turn are alike, whatever that was"


@pytest.mark.parametrize(("low", "high", "want"), [(1.1, 1.2, "slower"), (0.8, 0.9, "faster"), (0.96, 1.04, "the same"),
                                                   (1.01, 1.2, "unclear"), (0.5, 2.0, "unclear")])
def test_verdicts(low, high, want):
    assert regression.verdict(low, high, 0.05) == want


def test_other_benches_and_machines_are_refused_unless_told(tmp_path):
    a = write(tmp_path / "a", {4: 1.0})
    other_bench = write(tmp_path / "b", {4: 1.0}, bench="post")
    other_machine = write(tmp_path / "c", {4: 1.0}, machine={**MACHINE, "cpu": "Y"})
    for path, word, option in ((other_bench, "of bench push_pull", "--any-bench"),
                               (other_machine, "cpu 'X' and 'Y'", "--any-machine")):
        refused = run(a, path)
        assert refused.exit_code == 2 and word in refused.output and option in refused.output
        assert run(a, path, option).exit_code == 0
    nothing_common = run(a, write(tmp_path / "d", {8: 1.0}))
    assert nothing_common.exit_code == 2 and "no row in common" in nothing_common.output


@pytest.mark.parametrize("text", ["", "x", "[1]", "1\n2", '{"a": 1}',
                                  '{"bench": "x"}\n{"measured": {"samples_s": []}}', "\xff\xfe",
                                  '{"bench": "x", "machine": null}\n{"measured": {"samples_s": [1]}}',
                                  '{"bench": "x"}\n{"chosen": null, "measured": {"samples_s": [1]}}',
                                  '{"bench": "x"}\n{"measured": [1]}', '{"bench": "kernels", "rows": 1}',
                                  '{"bench": "x"}\n{"measured": {"samples_s": [1, 0, 1]}}',
                                  '{"bench": "x"}\n{"measured": {"samples_s": [1, NaN, 1]}}'])
def test_what_is_no_result_file_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=str(path)):
        result_file.read(path)


def test_turns_of_no_known_length_are_drawn_by_the_sample(tmp_path):
    path = write(tmp_path / "a", {4: 1.0}, n_per_round=0)
    assert run(path, path).exit_code == 0


@pytest.mark.parametrize("name", ["kernels.json", "ladder.jsonl", "rows.jsonl"])
def test_our_own_results_are_read_and_the_same_as_themselves(name):
    found = result_file.read(RESULTS / name)
    assert found.bench == name.partition(".")[0]
    compared = regression.compare(found.series, found.series)
    assert len(compared.rows) == len(found.series) and not compared.only_before
    assert all(row.ratio == 1 and row.verdict in ("the same", "unclear") for row in compared.rows)
