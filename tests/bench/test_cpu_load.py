"""Processes that burn CPU time: the requested number, busy, and gone afterwards."""
from __future__ import annotations

import os
import time

import psutil

from bpsfast.bench.harness.cpu_load import CpuLoad


def test_each_core_is_busy_and_afterwards_free():
    with CpuLoad(2) as burners:
        assert len(burners.pids) == 2 * len(os.sched_getaffinity(0))
        processes = [psutil.Process(pid) for pid in burners.pids]
        deadline = time.monotonic() + 30.0
        while min(process.cpu_times().user for process in processes) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not any(process.is_running() for process in processes)


def test_none_are_asked_for():
    with CpuLoad(0) as burners:
        assert burners.pids == []
