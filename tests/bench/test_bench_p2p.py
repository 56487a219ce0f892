"""bench post: refused options, and a small run that writes its measurements."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import post
from bpsfast.orchestration.errors import ConfigError


@pytest.mark.parametrize("options", [{"n_nodes": 3}, {"sizes": "x"}, {"sizes": "8K:4K"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        post.run(options)


@pytest.mark.slow
def test_it_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    post.run({"sizes": "8,100K", "n_rounds": 1, "n_nodes": 1, "json_path": str(path)})
    manifest, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "post"
    contestants = {row["chosen"]["contestant"] for row in rows}
    assert "bpsfast" in contestants and len(rows) == 2 * len(contestants)
    for row in rows:
        assert row["measured"]["n_wrong"] == 0
        assert len(row["measured"]["samples_s"]) == row["chosen"]["n_per_round"]
        assert 0 < row["measured"]["p50_s"] <= row["measured"]["p99_s"] <= row["measured"]["p100_s"]
    assert "one way (us), 1 node" in capsys.readouterr().out
