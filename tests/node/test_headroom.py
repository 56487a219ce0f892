"""Headroom: every bound above the process counts, both generations of cgroups, and refusals give both numbers."""
from __future__ import annotations

import re

import pytest

from bpsfast.node import regions
from bpsfast.orchestration.errors import CapacityError

MIB = 1 << 20


def tree(root, memberships, mounts, groups):
    """Write a /proc and cgroup file system under *root*; groups: {path: {file: text}}."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(memberships)
    (root / "proc/self/mountinfo").write_text(mounts)
    for path, files in groups.items():
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


def v2(limit, used, cache=0):
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n",
            "memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 0\n"}


V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def test_the_machine_itself_is_always_a_limit(tmp_path):
    (found,) = regions.memory_limits(tmp_path)
    assert found.source == "the machine" and 0 < found.free_nbytes <= found.nbytes


def test_all_ancestors_of_a_v2_group_count(tmp_path):
    tree(tmp_path, "0::/a/b\n", V2_MOUNT, {
        "sys/fs/cgroup/a": v2(100 * MIB, 90 * MIB), "sys/fs/cgroup/a/b": v2("max", MIB), "sys/fs/cgroup": {}})
    found = [limit for limit in regions.memory_limits(tmp_path) if limit.source != "the machine"]
    assert [(limit.nbytes, limit.free_nbytes) for limit in found] == [(100 * MIB, 10 * MIB)]
    assert found[0].source.endswith("/a")


def test_page_cache_counts_as_free(tmp_path):
    tree(tmp_path, "0::/a\n", V2_MOUNT, {"sys/fs/cgroup/a": v2(100 * MIB, 90 * MIB, cache=50 * MIB)})
    assert regions.memory_limits(tmp_path)[1].free_nbytes == 60 * MIB


def test_v1_limits_are_found_and_no_limit_is_none(tmp_path):
    def group(limit):
        return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{10 * MIB}\n",
                "memory.stat": f"inactive_file 7\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n"}

    tree(tmp_path, "4:memory:/job\n0::/\n", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", {
        "sys/fs/cgroup/memory": group(9223372036854771712), "sys/fs/cgroup/memory/job": group(200 * MIB)})
    found = [limit for limit in regions.memory_limits(tmp_path) if limit.source != "the machine"]
    assert [(limit.nbytes, limit.free_nbytes) for limit in found] == [(200 * MIB, 192 * MIB)]


def test_in_a_container_the_mount_begins_at_our_own_group(tmp_path):
    tree(tmp_path, "0::/docker/123\n", "31 23 0:28 /docker/123 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
         {"sys/fs/cgroup": v2(300 * MIB, 100 * MIB)})
    assert regions.memory_limits(tmp_path)[1].free_nbytes == 200 * MIB


def test_a_refusal_gives_both_numbers_and_names_the_group(tmp_path):
    tree(tmp_path, "0::/a\n", V2_MOUNT, {"sys/fs/cgroup/a": v2(200 * MIB, 100 * MIB)})
    regions.require_memory(36 * MIB, "a test", tmp_path)
    with pytest.raises(CapacityError, match=re.escape(f"a test needs {37 * MIB} bytes (37.0 MiB)")) as caught:
        regions.require_memory(37 * MIB, "a test", tmp_path)
    assert f"has {36 * MIB} bytes (36.0 MiB) free of {200 * MIB}" in str(caught.value)
    assert "cgroup" in str(caught.value)
