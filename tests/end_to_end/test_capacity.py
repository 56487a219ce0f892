"""A memory limit that is too small is refused with both numbers, before a page is faulted in and anybody is killed."""
from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import numpy as np
import pytest

import bpsfast

LIMIT_NBYTES = 512 << 20


@contextlib.contextmanager
def small_cgroup():
    """A real memory cgroup below our own (v1, or v2 where we may create one), emptied and removed at the end."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    choices = [("/sys/fs/cgroup/memory", own.get("memory"), "memory.limit_in_bytes"),
               ("/sys/fs/cgroup", own.get(""), "memory.max")]
    for mount, path, limit in choices:
        if path is None:
            continue
        parent = Path(mount + path)
        group = parent / f"bpsfast-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(LIMIT_NBYTES))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            for pid in (group / "cgroup.procs").read_text().split():
                (parent / "cgroup.procs").write_text(pid)
            group.rmdir()
        return
    pytest.skip("needs root and a memory cgroup that may have children")


def too_much():
    try:
        bpsfast.empty(1 << 28)
    except bpsfast.CapacityError as exc:
        first = str(exc)
    try:
        bpsfast.push_pull(np.ones(1 << 26, np.float32), name="large")
    except bpsfast.CapacityError as exc:
        second = str(exc)
    total = bpsfast.push_pull(np.full(1 << 20, bpsfast.rank() + 1, np.float32), average=False, name="small")
    return first, second, float(total[0])


@pytest.mark.root
@pytest.mark.slow
def test_a_cgroup_limit_is_refused_in_numbers_and_the_job_goes_on(job):
    with small_cgroup() as group:
        started = job(ranks=(2,))
        (group / "cgroup.procs").write_text(str(started.daemons["node 0"].pid))
        for first, second, total in started.run(too_much):
            for text, needed in ((first, 1 << 30), (second, 2 << 28)):
                numbers = [int(number) for number in re.findall(r"\d{6,}", text)]
                assert LIMIT_NBYTES in numbers and max(numbers) >= needed, text
            assert total == 3.0
        started.close()
        failures = group / "memory.failcnt"
        assert not failures.exists() or failures.read_text().strip() == "0"
