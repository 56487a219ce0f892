"""bench codecs: counts of wrong values, the table, and a short run on this machine."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import codecs


@pytest.mark.parametrize("name", codecs.CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_wrong_and_what_is_would_be_counted(name, dtype):
    tensors = codecs.Tensors(codecs.CODECS[name], dtype, n_tensors=1, tensor_nbytes=1 << 14)
    assert tensors.n_wrong() == 0
    tensors.decode = lambda i, adds: tensors.targets[i].__setitem__(slice(0, 3), 1e9)
    assert tensors.n_wrong() >= 3


def test_a_table_has_a_line_for_each_codec_and_dtype():
    rows = [codecs.Row(name, "float32", each, 1 << 17, samples_s=[0.5 if each == "memcpy" else 1.0])
            for name in ("onebit", "int8") for each in codecs.CONTESTANTS]
    lines = codecs.report(rows).splitlines()
    assert lines[1].split() == ["onebit", "float32", "3.12", "500000", "0.50", "0.50", "0.50", "0.50", "0"]
    assert [line.split()[0] for line in lines[1:3]] == ["onebit", "int8"]


def test_a_quick_run_writes_what_it_promises(tmp_path, capsys):
    path = tmp_path / "codecs.jsonl"
    codecs.run({"quick": True, "n_rounds": 1, "json_path": str(path)})
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "codecs"
    assert len(records) == 3 * len(codecs.CONTESTANTS)
    assert all(each["measured"]["n_wrong"] == 0 and each["measured"]["of_memcpy"] > 0 for each in records)
    assert "onebit" in capsys.readouterr().out
