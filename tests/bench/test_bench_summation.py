"""bench summation: vectors and non-temporal stores in compiled code, values of updates, the model, a short run."""
from __future__ import annotations

import json
import platform
from pathlib import Path

import numpy as np
import pytest

from bpsfast import kernels
from bpsfast.bench.harness import plots
from bpsfast.bench.harness.cold_memory import PARTITION_NBYTES
from bpsfast.bench.paper import summation
from bpsfast.bench.paper.summation import instructions, lines, operations, updates
from bpsfast.kernels import sum_ir
from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import port

needs_x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 instructions")
RNG = np.random.default_rng(1)


@needs_x86
@pytest.mark.parametrize("name", operations.SUM_DTYPES)
def test_sums_are_packed_as_wide_as_the_cpu_and_stored_past_the_caches(name):
    found = instructions.count(kernels.assembly(name))
    assert found.vector_nbytes == sum_ir.vector_nbytes(sum_ir.target()[2])
    assert found.n_packed > 8 and found.n_past_caches > 8


@needs_x86
def test_the_updates_it_is_compared_with_are_packed_too():
    widths = {name: instructions.count(updates.assembly(name)).vector_nbytes for name in updates.UPDATES}
    assert min(widths.values()) >= min(32, sum_ir.vector_nbytes(sum_ir.target()[2]))


@needs_x86
def test_copies_of_the_compiled_modules_are_stored_past_the_caches():
    text = instructions.disassembly(Path(port.__file__))
    if text is None:
        pytest.skip("objdump is not installed (apt install binutils)")
    assert instructions.count(text).n_past_caches >= 8  # AVX-512 and AVX, four stores each


def test_scalar_code_and_plain_stores_are_not_counted():
    scalar = "\tvaddss\t(%rax), %xmm0, %xmm0\n\tvmovups\t%zmm0, (%rax)\n\taddq\t$4, %rax\n"
    assert instructions.count(scalar) == (0, 0, 0)
    packed = "\tvaddps\t(%rax), %zmm1, %zmm0\n  12:\tvmovntps %ymm1,(%rdi)\n\tpaddd\t%xmm1, %xmm0\n"
    assert instructions.count(packed) == (64, 2, 1)


@pytest.mark.parametrize("name", updates.UPDATES)
def test_updates_are_those_of_the_books(name):
    w, g, m = (RNG.standard_normal(1003).astype(np.float32) for _ in range(3))
    v = RNG.random(1003).astype(np.float32)
    square = 0.999 * v + 0.001 * g * g
    want = {"SGD": w - 1e-3 * g, "momentum": w - 1e-3 * (0.9 * m + g),
            "RMSProp": w - 1e-3 * g / (np.sqrt(square) + 1e-8),
            "Adam": w - 1e-3 * (0.9 * m + 0.1 * g) / (np.sqrt(square) + 1e-8)}[name]
    state = {"SGD": [], "momentum": [m], "RMSProp": [v], "Adam": [m, v]}[name]
    updates.compiled(name)(w, g, *state)
    np.testing.assert_allclose(w, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state[-1] if name in ("RMSProp", "Adam") else square, square, rtol=1e-5)


@pytest.fixture
def rows():
    """Return rows of two cores: a core processes a partition per second and unit of traffic; two are not faster."""
    found = operations.rows(4, 1, operations.SUM_DTYPES) + operations.rows(4, 2, operations.SUM_DTYPES)
    for row in found:
        row.cpu_s = [float(row.n_streams)]
        row.samples_s = [float(row.n_streams * row.n_threads)]
    return found


def test_cores_and_memory_add_up(rows):
    unit = 8.0 * PARTITION_NBYTES  # bits of memory traffic per second that all cores reach
    here, offered = lines.machine(rows), lines.services(rows, n_workers=4)
    assert here == (2, unit)
    assert [service.traffic for service in offered] == [3.25, 4.0, 4.5, 4.5, 5.0]
    assert [service.cores(unit) for service in offered] == [1.25, 2.0, 2.5, 2.5, 3.0]
    assert lines.limit(offered[0], unit / 3.3, here) == ""
    assert lines.limit(offered[1], unit / 3.3, here) == "memory"
    assert lines.limit(offered[0], unit / 3.3, lines.Machine(0, unit)) == "cores"
    assert lines.verdict(offered, unit / 6, here).endswith("yes, and with any update")
    assert lines.verdict(offered, unit / 3.3, here).endswith("yes, but not with SGD, momentum, RMSProp, Adam")
    assert lines.verdict(offered, unit, here).endswith("no, memory")


def test_a_report_is_80_columns_wide(rows):
    text = summation.report(rows, 4, [10e6, 25e6, 100e6, 400e6], instructions.Instructions(64, 10, 5))
    assert max(map(len, text.splitlines())) <= 80
    assert "sum + Adam" in text and "10 packed instructions" in text


@pytest.mark.parametrize("options", [{"n_workers": 1}, {"n_workers": 9}, {"lines": "x"}, {"lines": "0"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        summation.run(options)


def test_a_plot_that_cannot_be_drawn_is_refused_before_measuring(monkeypatch):
    monkeypatch.setattr(plots, "missing", lambda: "no plot: matplotlib is not installed")
    with pytest.raises(ConfigError, match="matplotlib is not installed"):
        summation.run({"plot_path": "x.png"})


@pytest.mark.slow
def test_a_run_writes_and_draws_what_it_measured(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path, picture = tmp_path / "out.jsonl", tmp_path / "out.png"
    summation.run({"quick": True, "n_rounds": 1, "n_workers": 2, "lines": "10", "json_path": str(path),
                   "plot_path": str(picture)})
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "summation" and manifest["options"]["n_workers"] == "2"
    measured = [record for record in records if record["section"] == "summation"]
    assert {record["chosen"]["operation"] for record in measured} == {
        "copy", "sum in place", "sum, fused", "SGD", "momentum", "RMSProp", "Adam"}
    assert all(record["measured"]["core_bits"] > 0 and len(record["measured"]["samples_s"]) == 1 for record in measured)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "cores for a line of" in capsys.readouterr().out
