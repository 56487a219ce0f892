"""bench rows: refused options, the report, and one small run between two nodes."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench import rows
from bpsfast.launch.namespaces import netns
from bpsfast.orchestration.errors import ConfigError


@pytest.mark.parametrize("options", [{"table_size": "big"}, {"table_size": "1K"}, {"share": 1e-9}])
def test_a_table_without_rows_to_push_is_refused(options):
    with pytest.raises(ConfigError, match="make no row to push"):
        rows.run(options)


@pytest.mark.parametrize("on_loopback", [True, False])
def test_a_small_run(monkeypatch, tmp_path, capsys, on_loopback):
    if on_loopback:
        monkeypatch.setattr(netns, "missing", lambda: "not now")
    elif netns.missing() is not None:
        pytest.skip(netns.missing())
    path = tmp_path / "rows.jsonl"
    manifest, *records = rows.run({"quick": True, "json_path": str(path)})
    assert manifest["bench"] == "rows" and len(path.read_text().splitlines()) == 5
    assert [record["section"] for record in records] == ["rows", "dense"] * 2
    for record in records:
        measured, n_machines = record["measured"], record["chosen"]["n_machines_counted"]
        assert measured["n_wrong"] == 0 and len(measured["samples_s"]) == len(measured["sent_nbytes"]) == 2
        share = rows.of_dense(measured, n_machines)
        least, most = (0.9, 1.3) if record["section"] == "dense" else (0.01, rows.MOST_OF_DENSE)
        assert least < share and (share < most or on_loopback), "what others send over loopback counts, too"
        json.dumps(record)
    assert "of the dense bytes" in capsys.readouterr().out
