"""Who is in the job, in which order, and what is said when somebody is missing or one too many."""
from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.job.admission import Admission, JobSettings
from bpsfast.orchestration.messages import VERSION, Join


def join(host="a", n_ranks=1, **fields):
    base = dict(version=VERSION, package="1.0", host=host, pid=1, index=-1, ranks=(-1,) * n_ranks, server_processes=0,
                address=f"{host}:1", shm_name="", nic_rate_bytes=0.0, settings={})
    return Join(**{**base, **fields})


def admission(*joins, package="", fingerprint=None, **expected):
    """An admission that has admitted *joins* from senders 0, 1, ..."""
    result = Admission(JobSettings(**{"num_nodes": 2, **expected}, package=package, fingerprint=fingerprint))
    for i, each in enumerate(joins):
        assert result.check(each) is None
        result.add(b"%d" % i, each)
    return result


def order(result):
    return [(node.host, node.ranks) for _, node in result.roster()]


# -- agreement --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("fields", "text"), [
    ({"version": 99}, f"protocol version differs: 99 on host b (pid 1), {VERSION} on the scheduler"),
    ({"package": "1.1"}, "package version differs: 1.1 on host b (pid 1), 1.0 on the scheduler"),
    ({"settings": {"transport": "shm"}}, "setting transport differs: shm on host b (pid 1), tcp on the scheduler"),
    ({"settings": {}}, "setting transport differs: (not sent) on host b (pid 1), tcp on the scheduler"),
    ({"settings": {"transport": "tcp", "x": "1"}}, "setting x differs: 1 on host b (pid 1), (not known) on"),
])
def test_a_mismatch_names_the_field_and_both_values(fields, text):
    ours = Admission(JobSettings(num_nodes=2, package="1.0", fingerprint={"transport": "tcp"}))
    assert ours.check(join("a", settings={"transport": "tcp"})) is None
    assert text in str(ours.check(join("b", **fields)))


def test_the_first_node_is_the_reference_if_the_scheduler_has_no_settings():
    ours = admission(join("a", settings={"x": "1"}))
    assert "x differs: 2 on host b (pid 1), 1 on host a (pid 1)" in str(ours.check(join("b", settings={"x": "2"})))


def test_where_nobody_knows_the_machines_all_ranks_are_everybody():
    ours = admission(join("b", 1, ranks=(3,)), num_nodes=-1, size=4)
    assert not ours.complete() and ours.contradiction() is None
    assert "missing rank 0 (its node never joined), rank 1 (its node never joined), rank 2" in ours.describe()
    ours.add(b"9", join("a", ranks=(0, 1, 2)))
    assert ours.complete() and order(ours) == [("a", (0, 1, 2)), ("b", (3,))]
    ours.add(b"10", join("c", ranks=(1,)))
    assert "size is 4, but 5 ranks came: 1 on host b, 3 on host a, 1 on host c" in str(ours.contradiction())


def test_helpers_are_waited_for_where_nobody_knows_the_machines():
    ours = admission(join("a", ranks=(0, 1)), num_nodes=-1, size=2, num_helpers=1)
    assert not ours.complete()
    ours.add(b"9", join("h", 0))
    assert ours.complete()


# -- order and ranks --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("joins", "expected"), [
    # by arrival
    ([join("a", 2), join("b", 1)], [("a", (0, 1)), ("b", (2,))]),
    # by wish
    ([join("a", 2, index=1), join("b", 1, index=0)], [("b", (0,)), ("a", (1, 2))]),
    # by wish, the other takes what is free
    ([join("a", 1), join("b", 1, index=0)], [("b", (0,)), ("a", (1,))]),
    # by lowest rank
    ([join("a", ranks=(3, 1)), join("b", ranks=(2, 0))], [("b", (2, 0)), ("a", (3, 1))]),
    # wishes go before ranks
    ([join("a", ranks=(0, 1), index=1), join("b", ranks=(2, 3), index=0)], [("b", (2, 3)), ("a", (0, 1))]),
])
def test_node_order_and_ranks(joins, expected):
    ours = admission(*joins)
    assert ours.complete() and order(ours) == expected
    assert [node.index for _, node in ours.roster()] == [0, 1]


def test_everybody_knows_every_machines_page_size():
    ours = admission(join("a"), join("b", page_nbytes=65536))
    assert [node.page_nbytes for _, node in ours.roster()] == [4096, 65536]


def test_helpers_come_last_by_wish_then_arrival():
    ours = admission(join("h1", 0), join("a"), join("h2", 0, index=9), join("b"), join("h3", 0, index=4), num_helpers=3)
    assert ours.complete()
    assert order(ours) == [("a", (0,)), ("b", (1,)), ("h3", ()), ("h2", ()), ("h1", ())]


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_arrival_does_not_matter_for_explicit_ranks(arrivals):
    joins = [join(f"h{i}", ranks=(2 * i, 2 * i + 1)) for i in range(4)]
    ours = admission(*(joins[i] for i in arrivals), num_nodes=4)
    assert order(ours) == [(f"h{i}", (2 * i, 2 * i + 1)) for i in range(4)]


@pytest.mark.parametrize(("joins", "size", "words"), [
    ([join("a", ranks=(0,)), join("b", ranks=(0,))], -1, r"0 to 1, each once, got \[0\] on host a, \[0\] on host b"),
    ([join("a", ranks=(0,)), join("b", ranks=(-1,))], -1, "set all or none"),
    ([join("a", ranks=(0,)), join("b", ranks=(2,))], -1, "0 to 1"),
    ([join("a", 2), join("b", 1)], 4, "size is 4, but 3 ranks are there: 2 on host a, 1 on host b"),
])
def test_wrong_ranks_are_refused(joins, size, words):
    ours = admission(*joins, size=size)
    assert ours.complete()
    with pytest.raises(ConfigError, match=words):
        ours.roster()


# -- completeness -----------------------------------------------------------------------------------------

def test_complete_needs_every_node_and_helper():
    ours = admission(join("a"), join("b"), num_helpers=1)
    assert not ours.complete() and ours.contradiction() is None
    ours.add(b"h", join("h", 0))
    assert ours.complete() and ours.contradiction() is None


@pytest.mark.parametrize(("joins", "words"), [
    ([join("a"), join("b"), join("c")], "num_nodes is 2, but 3 nodes with ranks came: a, b, c"),
    ([join("a"), join("h", 0)], "num_helpers is 0, but 1 nodes without ranks joined: h"),
    ([join("a", index=0, pid=7), join("b", index=0, pid=8)], r"node_index 0: host a \(pid 7\) and host b \(pid 8\)"),
    ([join("a", index=2)], "host a has node_index 2, but num_nodes is 2"),
])
def test_contradictions(joins, words):
    error = admission(*joins).contradiction()
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=words):
        raise error


@pytest.mark.parametrize(("counts", "n_server_processes", "complete", "n_helpers"), [
    # (ranks, server processes) of each node
    ([(1, 0), (1, 0)], 0, True, 0),
    ([(1, 1), (1, 1)], 2, True, 0),  # both servers are the worker machines' own nodes
    ([(1, 1), (1, 0), (0, 1)], 2, True, 1),
    ([(1, 0), (1, 0), (0, 1), (0, 1)], 2, True, 2),
    ([(1, 2), (1, 0)], 2, True, 0),
    ([(1, 1), (1, 0)], 2, False, 0),
    ([(1, 0), (0, 1)], 1, False, 1),
])
def test_server_processes_are_counted_as_byteps_counts(counts, n_server_processes, complete, n_helpers):
    joins = [join(f"h{i}", n_ranks, server_processes=n) for i, (n_ranks, n) in enumerate(counts)]
    ours = admission(*joins, num_server_processes=n_server_processes)
    assert ours.contradiction() is None
    assert ours.complete() is complete
    if complete:
        assert sum(not node.ranks for _, node in ours.roster()) == n_helpers


def test_too_many_server_processes_contradict():
    ours = admission(join("a", server_processes=2), num_server_processes=1)
    assert "DMLC_NUM_SERVER is 1, but 2 server processes joined" in str(ours.contradiction())


def test_a_helper_may_turn_out_to_be_a_worker_machine():
    first = join("a", 0, server_processes=1)
    ours = admission(first, join("b"), num_server_processes=1)
    assert not ours.complete()
    ours.add(b"0", msgspec.structs.replace(first, ranks=(-1, -1)))
    assert ours.complete() and order(ours) == [("a", (0, 1)), ("b", (2,))]


# -- words ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("joins", "expected", "text"), [
    ([], {}, "have nobody; missing node 0 (never joined), node 1 (never joined)"),
    ([join("a", 2)], {}, "have node 0 (a, 2 ranks); missing node 1 (never joined)"),
    ([join("a", 2, index=1)], {}, "have node 1 (a, 2 ranks); missing node 0 (never joined)"),
    ([join("h", 0), join("b")], {"num_helpers": 2},
     "have node 0 (b, 1 rank), helper 0 (h); missing node 1 (never joined), helper 1 (never joined)"),
    ([join("a"), join("b", server_processes=1)], {"num_server_processes": 3},
     "have node 0 (a, 1 rank), node 1 (b, 1 rank); missing 2 of 3 server processes (never joined)"),
    ([join("a"), join("b")], {}, "have node 0 (a, 1 rank), node 1 (b, 1 rank); missing nobody"),
])
def test_describe_names_who_is_here_and_who_is_missing(joins, expected, text):
    assert admission(*joins, **expected).describe() == text


def test_many_missing_nodes_are_named_by_ranges():
    joins = [join(f"h{index}", 1, index=index) for index in (0, 1, 5)]
    text = admission(*joins, num_nodes=1024, num_helpers=40).describe()
    assert "have node 0 (h0, 1 rank), node 1 (h1, 1 rank), node 5 (h5, 1 rank)" in text
    assert "missing 1021 nodes, 2 to 4, 6 to 1023 (never joined), 40 helpers, 0 to 39 (never joined)" in text
    assert len(text) < 300
