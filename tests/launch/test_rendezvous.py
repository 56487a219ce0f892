"""Tests the rendezvous through a store, one thread for each rank; `test_store_joining` has real jobs."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bpsfast.base.job_key import job_key, machine_secret
from bpsfast.base.settings import load_with_origins
from bpsfast.launch import rendezvous
from bpsfast.launch.namespaces import Cluster
from bpsfast.launch.process_role import ProcessRole
from bpsfast.orchestration.errors import BpsError, ConfigError, MismatchError, StallError
from tests.support.directory_store import DirectoryStore

pytestmark = pytest.mark.usefixtures("no_leaks")
KEY = "ab" * 32


def place(store: Any, rank: int, size: int, timeout_s: float = 20.0, environ: Mapping[str, str] | None = None,
          settings: Mapping[str, Any] | None = None) -> ProcessRole:
    return rendezvous.role_of(store, rank, size, load_with_origins(settings, {})[0], timeout_s, environ or {})


def places(folder: Path, settings: list[dict[str, Any]], timeout_s: float = 20.0) -> list[Any]:
    """Return the place, or the error, of each rank; each has an end of the store, and settings, of its own."""

    def one(rank: int) -> Any:
        try:
            return place(DirectoryStore(folder), rank, len(settings), timeout_s, settings=settings[rank])
        except BpsError as exc:
            return exc

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(one, range(len(settings))))


def release(found: list[Any]) -> None:
    for each in found:
        if isinstance(each, ProcessRole) and each.reserved is not None:
            each.reserved.close()


def test_all_ranks_see_one_job(tmp_path):
    found = places(tmp_path, [{}] * 3)
    first = found[0]
    assert len({each.job_key for each in found}) == 1 and len(first.job_key) == 32
    assert {(each.scheduler, each.node_id, each.size, each.local_size, each.launcher) for each in found} == {
        (first.scheduler, first.node_id, 3, 3, "store")}
    assert [each.local_rank for each in found] == [0, 1, 2]
    assert [each.rank for each in found if each.starts_node] == [each.rank for each in found if each.starts_scheduler]
    assert first.starts_node and first.starts_scheduler and not found[1].starts_node
    assert first.reserved.getsockname() == first.scheduler, "nobody else is given that port"
    assert not first.is_joined_once
    release(found)


def test_a_store_is_used_again_by_the_same_ranks(tmp_path):
    first, second = places(tmp_path, [{}] * 2), places(tmp_path, [{}] * 2)
    assert first[0].job_key != second[0].job_key and first[0].scheduler != second[0].scheduler
    assert second[0].job_key == second[1].job_key
    release(first + second)


def test_nodes_are_numbered_by_their_first_rank(tmp_path):
    found = places(tmp_path, [{"node_id": name} for name in ("b", "a", "b", "a", "c")])
    assert [each.node_index for each in found] == [0, 1, 0, 1, 2]
    assert [each.local_rank for each in found] == [0, 0, 1, 1, 0]
    assert [each.local_size for each in found] == [2, 2, 2, 2, 1]
    assert [each.starts_node for each in found] == [True, True, False, False, True]
    assert {each.num_nodes for each in found} == {3}
    assert len({each.node_id for each in found}) == 3
    release(found)


def test_a_given_key_is_not_in_the_store_and_each_job_has_its_own(tmp_path):
    first, second = (places(tmp_path, [{"job_key": KEY}] * 2) for _ in range(2))
    assert first[0].job_key == first[1].job_key != second[0].job_key
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in written and first[0].job_key.hex() not in written
    release(first + second)


def test_beyond_this_machine_a_key_is_needed_that_is_not_in_the_store(tmp_path):
    there = {"scheduler": "10.1.1.1:7700", "max_helpers": 1}
    for each in places(tmp_path, [there] * 2):
        assert isinstance(each, ConfigError) and "reads the ranks' store could join the job" in str(each), each
        assert "BPSFAST_JOB_KEY" in str(each)
    found = places(tmp_path, [{**there, "job_key": KEY}] * 2)
    assert [type(each) for each in found] == [ProcessRole] * 2, found
    release(found)


def test_on_one_machine_no_secret_is_in_the_store(tmp_path):
    found = places(tmp_path, [{"encryption": "on"}] * 2)
    assert [type(each) for each in found] == [ProcessRole] * 2, found
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert found[0].job_key == found[1].job_key and found[0].job_key.hex() not in written
    assert machine_secret().hex() not in written
    release(found)


def test_a_key_in_the_store_is_taken_only_by_who_was_asked_to(tmp_path):
    """An attacker may write into a store, too."""
    there = {"scheduler": "10.1.1.1:7700", "insecure": True, "max_helpers": 1}
    found = places(tmp_path, [there] * 2)
    assert [type(each) for each in found] == [ProcessRole] * 2, found
    assert found[0].job_key == found[1].job_key
    other = places(tmp_path, [there, {"max_helpers": 1}])[1]
    assert isinstance(other, MismatchError) and "BPSFAST_INSECURE=1 on all ranks or on none" in str(other)


def test_with_helpers_the_scheduler_is_where_the_user_says_and_the_key_is_theirs(tmp_path):
    found = places(tmp_path, [{"scheduler": "127.0.0.1:7700", "job_key": KEY, "num_helpers": 2}] * 2)
    assert {(each.scheduler, each.job_key, each.num_helpers) for each in found} == {
        (("127.0.0.1", 7700), bytes.fromhex(KEY), 2)}
    assert found[0].starts_scheduler and found[0].reserved is None


def test_a_given_key_is_never_replaced_by_one_of_the_store(tmp_path):
    """Whoever writes into the store would be the scheduler of a member that unpickles."""
    store = DirectoryStore(tmp_path)
    store.set("bpsfast/1/table", json.dumps({"nodes": [[0, 1]], "scheduler": "6.6.6.6:1", "job_key": "41" * 32}))
    with pytest.raises(MismatchError, match="in the ranks' store"):
        place(store, 1, 2, settings={"job_key": KEY, "insecure": True})


def test_without_key_and_secret_there_is_no_key_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_own_secret", lambda: b"")
    store = DirectoryStore(tmp_path)
    store.set("bpsfast/1/table", json.dumps({"nodes": [[0, 1]], "scheduler": "127.0.0.1:1", "nonce": "00" * 8}))
    with pytest.raises(ConfigError, match="no job key, and no secret"):
        place(store, 1, 2)


def test_on_one_machine_its_own_address_needs_no_key(tmp_path):
    found = places(tmp_path, [{"scheduler": "10.1.1.1:7700"}] * 2)
    assert [type(each) for each in found] == [ProcessRole] * 2 and found[0].job_key == found[1].job_key, found
    release(found)


def test_helpers_that_come_later_derive_the_same_key(tmp_path):
    address = "127.0.0.1:7700"
    found = places(tmp_path, [{"scheduler": address, "max_helpers": 1}, {"scheduler": address}])
    helpers = job_key(load_with_origins({}, {})[0], address)
    assert {each.job_key for each in found} == {helpers}


def test_rank_0_says_how_many_helpers_there_are(tmp_path):
    found = places(tmp_path, [{"scheduler": "127.0.0.1:7700", "num_helpers": 1}, {}])
    assert [each.num_helpers for each in found] == [1, 1] and found[0].job_key == found[1].job_key


def test_scheduler_and_helpers_of_a_launchers_own_job_are_no_wish(tmp_path):
    found = places(tmp_path, [{"scheduler": "127.0.0.1:7700", "num_helpers": 2, "rank": rank} for rank in range(2)])
    assert found[0].scheduler[1] not in (0, 7700) and {each.num_helpers for each in found} == {0}
    release(found)


@pytest.mark.parametrize(("settings", "kind", "texts"), [
    ([{"num_helpers": 1}, {}], ConfigError, ["BPSFAST_NUM_HELPERS = 1", "BPSFAST_SCHEDULER"]),
    ([{"max_helpers": 1}, {}], ConfigError, ["BPSFAST_MAX_HELPERS = 1", "BPSFAST_SCHEDULER"]),
    ([{"job_key": KEY}, {}], MismatchError, ["BPSFAST_JOB_KEY", "only rank 0 has one"]),
    ([{}, {"job_key": KEY}], MismatchError, ["BPSFAST_JOB_KEY", "only rank 1 has one"]),
    ([{"job_key": KEY}, {"job_key": "cd" * 32}], MismatchError, ["BPSFAST_JOB_KEY", "different"]),
])
def test_what_contradicts_is_the_same_error_on_all_ranks(tmp_path, settings, kind, texts):
    found = places(tmp_path, settings)
    assert [type(each) for each in found] == [kind] * 2
    assert all(text in str(each) for each in found for text in texts)
    assert "found by rank 0" in str(found[1])


def test_sizes_that_differ(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(place, DirectoryStore(tmp_path), 1, 3)
        with pytest.raises(MismatchError, match="rank 0 says that the job has 2 ranks, rank 1 says 3"):
            place(DirectoryStore(tmp_path), 0, 2)
        with pytest.raises(MismatchError, match="rank 1 says 3"):
            second.result()


def test_a_rank_too_many_is_told_so(tmp_path):
    release(places(tmp_path, [{}] * 2))
    with pytest.raises(MismatchError, match="rank 0 says that the job has 2 ranks, rank 2 says 3"):
        place(DirectoryStore(tmp_path), 2, 3)


def test_who_does_not_come_is_named_by_all(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(place, DirectoryStore(tmp_path), rank, 4, 0.5) for rank in (0, 1, 3)]
    for error in (call.exception() for call in calls):
        assert isinstance(error, StallError) and "rank 2 of 4 has not come to the store" in str(error)
        assert "within 0.5 s" in str(error)


def test_rank_0_that_does_not_come_is_named_too(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.1)
    with pytest.raises(StallError, match="ranks 0, 2 of 3 have not come to the store"):
        place(DirectoryStore(tmp_path), 1, 3, 0.2)


def test_many_absentees_are_not_all_named(tmp_path):
    with pytest.raises(StallError, match="ranks 1, 2, 3, 4, 5, 6, 7, 8 and others of 500 have not come"):
        place(DirectoryStore(tmp_path), 0, 500, 0.2)


def test_a_rank_that_comes_more_often_than_the_others(tmp_path):
    release(places(tmp_path, [{}] * 2))
    with pytest.raises(StallError, match=r"rank 1 of 2 has not come to the store for the 2\. time"):
        place(DirectoryStore(tmp_path), 0, 2, 0.3)


def test_a_rank_out_of_range(tmp_path):
    with pytest.raises(ConfigError, match="rank = 3"):
        place(DirectoryStore(tmp_path), 3, 3)


def test_another_version_in_the_store(tmp_path):
    store = DirectoryStore(tmp_path)
    store.set("bpsfast/1/table", '{"nodes": 5}')
    with pytest.raises(MismatchError, match="another version"):
        place(store, 1, 2)


_SERVES_UNTIL_RANK_0_HAS_COME = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store.wait(["bpsfast/1/rank/0"], timedelta(seconds=60))
os._exit(0)
"""
_WAITS_IN_A_STORE = """
import sys
import torch.distributed as dist
from tests.launch.test_rendezvous import place
place(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), 0, 2, 60.0)
"""


def test_a_store_of_torch_that_fails_is_named():
    pytest.importorskip("torch")
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", _SERVES_UNTIL_RANK_0_HAS_COME], stdout=subprocess.PIPE, text=True,
                          env=environ) as server:
        try:
            done = subprocess.run([sys.executable, "-c", _WAITS_IN_A_STORE, server.stdout.readline()], env=environ,
                                  stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        finally:
            server.kill()
    assert "PeerLostError: rank 0 of 2 cannot go on: the store by which the ranks find each other failed" in done.stderr


# -- addresses -----------------------------------------------------------------------------------------------------

_AS_ROOT = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]
_PRINTS_PLACE = """
import json, sys
from bpsfast.orchestration.errors import BpsError
from tests.launch.test_rendezvous import place
from tests.support.directory_store import DirectoryStore
folder, rank, size, master_addr, settings = sys.argv[1:]
try:
    found = place(DirectoryStore(folder), int(rank), int(size), environ={"MASTER_ADDR": master_addr},
                  settings=json.loads(settings))
    print(json.dumps([found.scheduler[0], found.node_index]))
except BpsError as exc:
    print(json.dumps([type(exc).__name__, str(exc)]))
"""


def on_machines(folder: Path, vias: list[list[str]], master_addr: str, **settings: Any) -> list[list[Any]]:
    """Return the scheduler's host and the node's number as each rank sees them, or its error; vias[i] runs rank i.

    Rank 0 has *settings*.
    """
    folder.mkdir()
    started = [subprocess.Popen([*via, sys.executable, "-c", _PRINTS_PLACE, str(folder), str(rank), str(len(vias)),
                                 master_addr, json.dumps({"job_key": KEY} | (settings if rank == 0 else {}))],
                                stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
               for rank, via in enumerate(vias)]
    try:
        return [json.loads(each.communicate(timeout=60)[0]) for each in started]
    finally:
        for each in started:
            each.kill()
            each.communicate(timeout=10)


@pytest.mark.parametrize("marks", [pytest.param("", marks=_AS_ROOT)])
def test_rank_0_tells_the_address_towards_the_others(tmp_path, marks):
    with Cluster(["a", "b"]) as cluster:
        (a, b), vias = (each.address for each in cluster), {each.name: each.via() for each in cluster}
        for number, master_addr in enumerate((b, a, "localhost", "127.0.1.1", "", "no-such-name.invalid")):
            found = on_machines(tmp_path / str(number), [vias[name] for name in "aba"], master_addr)
            assert found == [[a, 0], [a, 1], [a, 0]], f"MASTER_ADDR = {master_addr!r}"
        found = on_machines(tmp_path / "given", [vias["b"], vias["a"]], b, node_host="10.9.9.9")
        assert found == [["10.9.9.9", 0], ["10.9.9.9", 1]]
        found = on_machines(tmp_path / "interface", [vias["b"], vias["a"]], "", interface="eth0")
        assert found == [[b, 0], [b, 1]]
        found = on_machines(tmp_path / "loopback", [vias["b"], vias["a"]], "", scheduler="127.0.0.1:7700")
        assert [name for name, _ in found] == ["ConfigError"] * 2
        assert all("127.0.0.1:7700 cannot be reached from the other machines" in text for _, text in found)


@pytest.mark.parametrize("marks", [pytest.param("", marks=_AS_ROOT)])
def test_machines_without_addresses_are_an_error(tmp_path, marks):
    alone = ["unshare", "--net"]
    found = on_machines(tmp_path / "store", [alone, alone], "")
    assert [name for name, _ in found] == ["ConfigError"] * 2
    assert all("on 2 machines" in text and "BPSFAST_NODE_HOST" in text for _, text in found)
