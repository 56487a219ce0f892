"""bench saturation: refused options, and a curve of two sizes with the expected bytes on the wire."""
from __future__ import annotations

import json

import pytest

from bpsfast.bench.harness import plots
from bpsfast.bench.paper import saturation
from bpsfast.bench.paper.saturation import Point
from bpsfast.orchestration.errors import ConfigError
from tests.bench.test_bench import NamedGroup


@pytest.mark.parametrize("options", [{"curves": "x"}, {"compare": "mpi"}, {"sizes": "x"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        saturation.run(options)


@pytest.mark.parametrize("name", ["x.doc", "x"])
def test_a_plot_of_no_known_kind_is_refused_before_measuring(name):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with pytest.raises(ConfigError, match=f"--plot {name}: .*png"):
        saturation.run({"curves": "size", "sizes": "4K", "plot_path": name})


@pytest.mark.parametrize(("curve", "label"), [("size", "size, bytes"), ("credit", "credit, bytes"), ("ranks", "ranks")])
def test_a_plot_says_whose_lines_and_which_units(curve, label):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    points = []
    for name in ("bpsfast", "gloo"):
        points.append(Point(NamedGroup(name), 8, 8, 2, 2))
        points[-1].row.samples_s, points[-1].row.cpu_s = [1.0], [1.0]
    with plots.figure() as (_, [panel]):
        saturation.draw(panel, curve, points)
        assert [text.get_text() for text in panel.get_legend().get_texts()] == ["bpsfast", "gloo"]
        assert panel.get_xlabel() == label


@pytest.mark.slow
def test_a_curve_says_what_went_over_the_wire_and_who_burnt_what(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, picture = tmp_path / "out.jsonl", tmp_path / "out.png"
    saturation.run({"curves": "size", "sizes": "64K,1M", "quick": True, "n_rounds": 1, "json_path": str(path),
                    "plot_path": str(picture)})
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "saturation" and picture.read_bytes().startswith(b"\x89PNG")
    assert [record["chosen"]["value"] for record in records] == [64 << 10, 1 << 20]
    for record in records:
        nbytes, measured = record["chosen"]["nbytes"], record["measured"]
        assert record["section"] == "by size" and measured["n_wrong"] == 0
        # each of two nodes sends the other's half as a partial, and its own half as the result
        assert measured["sent_nbytes"] == pytest.approx(nbytes, rel=0.05)
        assert measured["received_nbytes"] == pytest.approx(nbytes, rel=0.05)
        assert measured["cpu_s_by_role"]["rank"] > 0 and measured["cpu_s_by_role"]["node"] > 0
        assert measured["memory_nbytes"] > 2 * nbytes
    shown = capsys.readouterr().out
    assert "goodput Gbit/s" in shown and max(map(len, shown.splitlines())) <= 120
