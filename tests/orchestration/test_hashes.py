"""BytePS's key hashes: golden values come from the same definitions written in C."""
from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration import placement_policy
from bpsfast.orchestration.errors import ConfigError

KEYS = (0, 1, 65536, 65537, (160 << 16) + 24, (1 << 32) + 7)


def c_string_hash(key: int, start: int, multiplier: int) -> int:
    """h = multiplier * h + c over the decimal digits, in unsigned 64 bits, with the digits made by division."""
    digits = []
    while True:
        key, digit = divmod(key, 10)
        digits.append(ord("0") + digit)
        if key == 0:
            break
    value = start
    for digit in reversed(digits):
        value = (multiplier * value + digit) % 2**64
    return value


@pytest.mark.parametrize(("key", "naive", "built_in", "djb2", "sdbm"), [
    (0, 0, 12638135523509116079, 177621, 48),
    (1, 9973, 12638134423997487868, 177622, 49),
    (65536, 9973, 2661626849473355202, 210653553582, 3850799628401345593),
    (65537, 19946, 2661627948984983413, 210653553583, 3850799628401345594),
    (10485784, 1835032, 12068300893916038740, 7570037172341674, 8808758135459078401),
    (4294967303, 653660339, 3924422168837310214, 8243912736032188596, 7541561758655267765),
])
def test_golden_values(key, naive, built_in, djb2, sdbm):
    assert placement_policy.naive(key) == naive
    assert placement_policy.built_in(key) == built_in
    assert placement_policy.djb2(key) == djb2
    assert placement_policy.sdbm(key) == sdbm


@pytest.mark.parametrize("key", KEYS)
def test_string_hashes_equal_their_definition(key):
    assert placement_policy.djb2(key) == c_string_hash(key, 5381, 33)
    assert placement_policy.sdbm(key) == c_string_hash(key, 0, 65599)


def test_naive_adds_tensor_and_partition():
    assert placement_policy.naive((3 << 16) + 5) == (3 + 5) * 9973


@pytest.mark.parametrize("n_workers, n_helpers, golden", [(8, 4, (2, 3, 0, 1, 4, 4)), (8, 0, (6, 7, 4, 5, 0, 0))])
def test_mixed_golden_values(n_workers, n_helpers, golden):
    assert tuple(placement_policy.mixed(key, n_workers, n_helpers) for key in KEYS) == golden


def test_mixed_gives_helpers_their_share_of_buckets():
    n_workers, n_helpers = 8, 4
    ratio = 2 * n_helpers * (n_workers - 1) / (n_workers * (n_workers + n_helpers) - 2 * n_helpers)
    keys = range(20000)
    on_helpers = sum(placement_policy.mixed(key, n_workers, n_helpers) < n_helpers for key in keys)
    assert on_helpers / len(keys) == pytest.approx(ratio, abs=0.02)


def test_mixed_refuses_more_helpers_than_workers():
    with pytest.raises(ConfigError, match="5 helpers and 4 machines"):
        placement_policy.mixed(1, 4, 5)


def test_mixed_refuses_fewer_buckets_than_servers():
    with pytest.raises(ConfigError, match="only 3 buckets for 4 servers"):
        placement_policy.mixed(1, 3, 1, bound=3)


def test_unknown_name_is_named():
    with pytest.raises(ConfigError, match=r"hash:md5 is unknown.*djb2"):
        placement_policy.server("md5", 1, 2, 0)


@settings(deadline=None)
@given(st.sampled_from(placement_policy.NAMES), st.integers(0, 2**48), st.integers(1, 40), st.integers(0, 40))
def test_server_is_a_node_index(name, key, n_workers, n_helpers):
    n_helpers = min(n_helpers, n_workers)
    assert 0 <= placement_policy.server(name, key, n_workers, n_helpers) < n_workers + n_helpers


def test_helpers_are_the_first_servers_and_the_last_nodes():
    assert placement_policy.naive(3) % 5 == 4 and placement_policy.server("naive", 3, 3, 2) == 2
    assert placement_policy.naive(5) % 5 == 0 and placement_policy.server("naive", 5, 3, 2) == 3
