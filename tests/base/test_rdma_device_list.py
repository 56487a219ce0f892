"""Tests the list of RDMA devices in NCCL's syntax."""
from __future__ import annotations

import pytest

from bpsfast.base.value_formats import parse_rdma_devices

PORTS = [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1), ("rxe0", 1)]


@pytest.mark.parametrize(("text", "admitted"), [
    ("", PORTS), (" , ", PORTS),
    ("mlx5", PORTS[:4]), ("mlx5_1", PORTS[1:4]), ("=mlx5_1", PORTS[1:3]), ("=mlx5_1:2", PORTS[2:3]),
    ("mlx5_1:1", [PORTS[1], PORTS[3]]), ("mlx5_0,rxe", [PORTS[0], PORTS[4]]), ("=mlx5_0,mlx5_1", PORTS[:3]),
    ("^mlx5_1", [PORTS[0], PORTS[4]]), ("^=mlx5_1", [PORTS[0], PORTS[3], PORTS[4]]),
    ("^=mlx5_1:2,mlx5_10", [PORTS[0], PORTS[1], PORTS[4]]),
    ("mlx5,^=mlx5_1:2", [PORTS[0], PORTS[1], PORTS[3]]), ("nothing", []),
])
def test_what_a_list_admits(text: str, admitted: list[tuple[str, int]]) -> None:
    parsed = parse_rdma_devices(text)
    assert [port for port in PORTS if parsed.admits(*port)] == admitted
    assert parse_rdma_devices(str(parsed)) == parsed, "what it prints means the same"


@pytest.mark.parametrize(("text", "words"), [
    ("=^mlx5", r"begins with '=\^'"), ("^^a", "begins with"), ("=", "names no device"), (":1", "names no device"),
    ("mlx5_0:", "names port ''"), ("mlx5_0:0", "numbered from 1"), ("mlx5_0:one", "names port 'one'"),
    ("mlx5_0:-1", "names port '-1'"), ("mlx5_0:\u0663", "numbered from 1"),
])
def test_what_is_no_list(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_rdma_devices(text)


def test_entries_that_match_nothing_are_found() -> None:
    assert list(map(str, parse_rdma_devices("=mlx5_0,mlx5_7,^rxe9").unmatched(PORTS))) == ["=mlx5_7"]
    assert parse_rdma_devices("^rxe").unmatched(PORTS) == [] and not parse_rdma_devices("^rxe").names_devices
    assert parse_rdma_devices("rxe").names_devices and not parse_rdma_devices("").names_devices
