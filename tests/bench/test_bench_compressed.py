"""bench compressed: refused options, figures and bars, and one small step on real packets."""
from __future__ import annotations

import json

import numpy as np
import pytest

from bpsfast.bench import compressed
from bpsfast.bench.compressed import report, step
from bpsfast.bench.compressed.report import UNCOMPRESSED, Found
from bpsfast.bench.harness.samples import Row
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner import catalog
from tests.bench.test_bench import NamedGroup

TOPK = "topk:k=0.01,error_feedback"


@pytest.mark.parametrize(("options", "words"), [
    ({"machines": "1"}, "counts from 2 to 16"), ({"machines": "two"}, "counts from 2 to 16"),
    ({"codecs": "onebit|zip"}, "no kind 'zip'"), ({"model": "alexnet"}, "'alexnet' is not built in"),
])
def test_what_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        compressed.run(options)


def test_without_namespaces_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match="links of their own: network namespaces need root"):
        compressed.run({})


def found(times_s, n_wrong=0):
    """Return steps of *times_s* by label; the bytes sent are a tenth of the time, in MB."""
    made = Found(catalog.load("resnet18"), 2, 0.1, 12.5e6, 5e10)
    for label, time_s in times_s.items():
        made.rows.append(Row(NamedGroup("bpsfast"), "step", made.model.nbytes, label=label, n_wrong=n_wrong,
                             samples_s=[time_s] * 3, cpu_busy=[0.5], cpu_s=[0.1]))
        made.sent[label] = [[1e5 * time_s, 0.5e5 * time_s]] * 3
    return made


def test_the_table_says_how_many_times_as_fast_and_whether_that_is_kept():
    text = report.text(found({UNCOMPRESSED: 4.0, TOPK: 0.8, "onebit": 2.0, "int8": 3.0}))
    lines = [line.split() for line in text.splitlines()[2:]]
    assert [line[2] for line in lines] == ["1.00x", "5.00x", "2.00x", "1.33x"]
    assert [line[3] for line in lines] == ["-", "4x", "2.2x", "-"]
    assert "NOT KEPT" not in text.splitlines()[3] and text.splitlines()[4].endswith("NOT KEPT")
    assert [line[6] for line in lines] == ["1/1.0", "1/5.0", "1/2.0", "1/1.3"]
    assert "7 WRONG" in report.text(found({UNCOMPRESSED: 4.0}, n_wrong=7))


def test_what_the_planner_expects_stands_beside():
    made = found({UNCOMPRESSED: 4.0, TOPK: 0.4})
    assert made.expected_s(UNCOMPRESSED) == pytest.approx(46.76e6 / 12.5e6 + 0.1, rel=0.03)
    assert 0.1 < made.expected_s(TOPK) < 0.5


def test_records_hold_raw_samples():
    plain, topk = report.records(found({UNCOMPRESSED: 4.0, TOPK: 0.8}))
    assert plain["chosen"]["codec"] == UNCOMPRESSED and plain["measured"]["promised"] is None
    assert topk["measured"]["samples_s"] == [0.8] * 3 and topk["measured"]["promised"] == 4.0
    assert topk["measured"]["speed"] == pytest.approx(5.0) and json.dumps(topk)


def test_every_rank_makes_the_gradients_of_the_others():
    first, again, other = (step._gradient("fc.weight", (10, 3), rank) for rank in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other) and first.dtype == np.float32


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_steps_on_real_packets_are_those_of_the_reading_and_send_fewer_bytes(tmp_path):
    lacking = netns.missing()
    if lacking is not None:
        pytest.skip(lacking)
    path = tmp_path / "out.jsonl"
    compressed.run({"machines": "2", "codecs": f"{TOPK}|onebit:error_feedback", "n_rounds": 1, "rate_mbit": 400.0,
                    "compute_s": 0.0, "json_path": str(path)})
    manifest, plain, topk, onebit = map(json.loads, path.read_text().splitlines())
    assert manifest["bench"] == "compressed"
    assert [each["measured"]["n_wrong"] for each in (plain, topk, onebit)] == [0, 0, 0]
    sent = [max(each["measured"]["sent_nbytes"][0]) for each in (plain, topk, onebit)]
    assert sent[0] == pytest.approx(46.76e6, rel=0.05), "with two machines every byte leaves each once"
    assert sent[1] == pytest.approx(0.02 * 46.76e6, rel=0.25) and sent[2] == pytest.approx(46.76e6 / 32, rel=0.25)
