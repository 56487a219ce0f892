"""When waits stay awake, for how long and where, and who is woken: `tests/native/linger.c`, which fails if not so."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import sanitized


def test_the_rules_hold(tmp_path: Path) -> None:
    done = sanitized.run_program("linger", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("header", "right", "wrong"), [
    ("cpu_contention.h", ">= BPS_MANY_MET || pause_ns == 0", ">= 0"),
    ("cpu_contention.h", "2 * __atomic_load_n(&contention->pause_ns", "200 * __atomic_load_n(&contention->pause_ns"),
    ("port.h", "return all_long ? port->awake_ns", "return !all_long ? port->awake_ns"),
    ("port.h", "? n + 1 : n;", "? BPS_LONG : n;"),
    ("futex.h", "!= seen\n        &&", "== seen\n        &&"),
    ("futex.h", "if (is_awake\n", "if (0\n"),
    ("port.h", "if (bps_load(&port->lane->tail) !=", "if (bps_load(&port->lane->tail) <="),
    ("cpu_separation.h", "(waiting >> cpu & 1) == 0)", "(waiting >> cpu & 1) != 0)"),
    ("cpu_separation.h", "now_ns < __atomic", "0 * now_ns < 0 * __atomic"),
    ("cpu_separation.h", "if (sched_setaffinity(0, sizeof *all, all) != 0)", "if (0)"),
    ("cpu_separation.h", "others |= __atomic_fetch_or(waiting", "__atomic_fetch_or(waiting"),
], ids=["never longer", "not doubled", "the other way round", "one is enough", "nobody told", "two awake",
        "rings always", "beside another", "each time", "bound", "both"])
def test_a_rule_spoilt_on_purpose_is_found(header: str, right: str, wrong: str, tmp_path: Path) -> None:
    if header == "cpu_separation.h" and len(os.sched_getaffinity(0) & set(range(64))) < 2:
        pytest.skip("there is one CPU, or none of the first 64: nobody can move")
    done = sanitized.run_program("linger", tmp_path, sanitized.spoilt_headers(tmp_path, header, right, wrong))
    assert "Assertion" in done.stderr
