"""What RDMA needs against what there is: queue lengths, regions, locked memory; every refusal with both numbers."""
from __future__ import annotations

import os
import resource

import pytest

from bpsfast.node.transport.rdma import rails
from bpsfast.orchestration.errors import CapacityError

MLX5 = {"max_qp": 131072, "max_qp_wr": 32768, "max_cqe": 4194303, "max_mr": 16777216, "max_mr_size": 1 << 64}
RXE = {"max_qp": 1048560, "max_qp_wr": 1048576, "max_cqe": 32767, "max_mr": 524287, "max_mr_size": 1 << 64}


@pytest.mark.parametrize(("attributes", "n_peers", "n_pairs", "expected"), [
    (MLX5, 1, 1, (128, 1024, 1152)),
    (MLX5, 256, 8, (128, 1024, 2_359_296)),
    (RXE, 7, 1, (128, 1024, 8064)),
    (RXE, 100, 1, (109, 218, 32_700)),
    (RXE, 256, 1, (42, 85, 32_512)),
    (MLX5 | {"max_qp_wr": 100}, 1, 1, (100, 100, 200)),
])
def test_depths_fill_what_the_device_has(attributes, n_peers, n_pairs, expected):
    found = rails.queue_depths("mlx5_0", attributes, n_peers, n_pairs, 128)
    assert tuple(found) == expected
    assert found.completions <= attributes["max_cqe"]


@pytest.mark.parametrize("n_sends", [1, 16, 128, 600, 16_384])
@pytest.mark.parametrize("attributes", [MLX5, RXE], ids=["mlx5", "rxe"])
def test_all_queues_fit_for_any_number_of_peers_or_none_is_made(attributes, n_sends):
    for n_streams in range(1, 3000):
        try:
            found = rails.queue_depths("mlx5_0", attributes, n_streams, 1, n_sends)
        except CapacityError:
            assert n_streams > attributes["max_cqe"] / 96 - 1, "a third of 96 is the least send queue"
            continue
        assert found.receive >= rails.LEAST_RECEIVES and found.receive <= attributes["max_qp_wr"] >= found.send >= 1
        assert found.receive >= min(2 * found.send, attributes["max_qp_wr"])
        assert n_streams * (found.send + found.receive) == found.completions <= attributes["max_cqe"]


def test_the_queue_for_sends_is_as_long_as_asked_for_if_the_device_can():
    assert [rails.queue_depths("mlx5_0", MLX5, 1, 1, n).send for n in (1, 16, 100_000)] == [1, 16, 32768]


def test_too_short_queues_are_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"400 peers x 1 .* need a completion queue of 36400 .* max_cqe=32767"):
        rails.queue_depths("rxe0", RXE, 400, 1, 128)
    with pytest.raises(CapacityError, match="8 peers x 2 queue pairs need 16 queue pairs, mlx5_0 has max_qp=15"):
        rails.queue_depths("mlx5_0", MLX5 | {"max_qp": 15}, 8, 2, 128)
    with pytest.raises(CapacityError, match="max_qp_wr=63"):
        rails.queue_depths("mlx5_0", MLX5 | {"max_qp_wr": 63}, 1, 1, 128)


def test_the_completion_vector_is_the_setting_s_or_that_of_the_process():
    assert [rails.completion_vector(n, 8) for n in (0, 7, 8)] == [0, 7, 8], "the device refuses 8 in words"
    assert rails.completion_vector(-1, 8) == os.getpid() % 8


def test_a_limit_that_the_first_model_exceeds_counts_as_none_where_there_is_another_way():
    default = 8 << 20  # the kernel's own limit
    rails.require_lockable(rails.least_lockable_nbytes("rdma", 2 << 20), 0, 1, "a node", default)
    with pytest.raises(CapacityError, match=r"needs 1073741824 bytes of locked memory .* memlock=8388608 leaves"):
        rails.require_lockable(rails.least_lockable_nbytes("auto", 2 << 20), 0, 1, "a node", default)
    rails.require_lockable(rails.least_lockable_nbytes("auto", 2 << 20), 0, 1, "a node", None)


def test_locked_memory_counts_once_per_device():
    rails.require_lockable(1 << 40, 1 << 40, 8, "a plan", None)
    rails.require_lockable(500, 0, 2, "a plan", 1000)
    with pytest.raises(CapacityError, match=r"a plan needs 1002 bytes .* \(501 bytes x 2 devices\), but memlock=1000 "
                                            r"leaves 1000: `ulimit -l unlimited`"):
        rails.require_lockable(501, 0, 2, "a plan", 1000)
    with pytest.raises(CapacityError, match=r"needs 200 bytes .* memlock=1000 leaves 100"):
        rails.require_lockable(100, 450, 2, "a plan", 1000)
    with pytest.raises(CapacityError, match=r"memlock=1000 leaves 0"):
        rails.require_lockable(100, 4500, 2, "a plan", 1000)


def test_regions_count_and_have_a_largest_size():
    rails.require_regions(9, "mlx5_0", MLX5 | {"max_mr": 10}, 1 << 30)
    with pytest.raises(CapacityError, match=r"region 11 of this node .* mlx5_0 has max_mr=10"):
        rails.require_regions(10, "mlx5_0", MLX5 | {"max_mr": 10}, 1)
    with pytest.raises(CapacityError, match=r"a segment of 4097 bytes .* max_mr_size=4096"):
        rails.require_regions(0, "mlx5_0", MLX5 | {"max_mr_size": 4096}, 4097)


@pytest.mark.parametrize(("effective", "namespace", "unlimited"), [
    ("0000000000004000", "0 0 4294967295", True),
    ("000001ffffffffff", "0 1000 1", False),  # a container's root: the kernel asks in the first namespace
    ("00000000a80425fb", "0 0 4294967295", False),
    (None, "0 0 4294967295", False),
])
def test_the_capability_lifts_the_limit(tmp_path, monkeypatch, effective, namespace, unlimited):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    folder = tmp_path / "proc/self"
    folder.mkdir(parents=True)
    (folder / "status").write_text("Name:\tx\n" + (f"CapEff:\t{effective}\n" if effective else ""))
    (folder / "uid_map").write_text(f"         {namespace}\n")
    assert rails.lockable_nbytes(tmp_path) == (None if unlimited else 65536)
    assert rails.lockable_nbytes(tmp_path / "nowhere") == 65536


def test_no_limit_is_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert rails.lockable_nbytes() is None
