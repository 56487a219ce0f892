"""`bpsfast bench push_pull -H`: measured on real hosts, with right counts. No test asserts a time."""
from __future__ import annotations

import importlib.util
import json

import pytest

from bpsfast.bench import push_pull
from bpsfast.bench.push_pull import over_hosts
from bpsfast.bench.push_pull.options import Plan
from bpsfast.launch import ssh_job
from bpsfast.launch.host_list import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError
from tests.support import ssh_hosts
from tests.support.ssh_hosts import SshHosts

_LACKING = ssh_hosts.missing()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_rows_of_all_sizes_come_from_the_hosts(tmp_path):
    with_gloo = importlib.util.find_spec("torch") is not None
    with SshHosts(["one", "two", "three"], tmp_path) as hosts:
        path = tmp_path / "result"
        where = ("-H", "one:2,two", "--helpers-on", "three")
        done = hosts.run("bench", "push_pull", *where, "--sizes", "4K,1M", "--quick", "--json", str(path),
                         *(("--compare", "gloo") if with_gloo else ()), timeout_s=150)
        assert done.returncode == 0, done.stderr
        assert not any(hosts.pids(name) for name in hosts.names)
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "push_pull"
    contestants = ["bpsfast", "gloo"] if with_gloo else ["bpsfast"]
    chosen = [record["chosen"] for record in records]
    assert [(each["contestant"], each["nbytes"]) for each in chosen] == [
        (name, nbytes) for name in contestants for nbytes in (4096, 1 << 20)]
    for record in records:
        assert record["section"] == "one:2, two:1, helper three"
        assert record["chosen"]["n_ranks"] == 3 and record["chosen"]["n_nodes"] == 2
        assert record["measured"]["n_wrong"] == 0
        assert len(record["measured"]["samples_s"]) == 3 * record["chosen"]["n_per_round"]
        assert all(sample > 0 for sample in record["measured"]["samples_s"])
    assert "# numpy (bpsfast), one:2, two:1, helper three" in done.stdout


def test_rows_are_known_among_what_libraries_print(tmp_path, capfdbinary, no_leaks):
    (tmp_path / "sitecustomize.py").write_text("import atexit\nprint('no end of line', end=' ', flush=True)\n"
                                               "atexit.register(print, 'goodbye')")
    sizes = (4096, 8192)
    hosts = ssh_job.SshPlan(hosts=(Host("localhost", 2),), ssh=Ssh(), variables={"PYTHONPATH": str(tmp_path)})
    said: list[str] = []
    records = over_hosts.run(Plan(sizes, 2, ("numpy",), (), quick=True, say=said.append), hosts)
    assert [record["chosen"]["nbytes"] for record in records] == list(sizes)
    assert [record["measured"]["n_wrong"] for record in records] == [0, 0]
    assert len(said) == 1
    shown = capfdbinary.readouterr().out
    assert b"[rank 0] no end of line goodbye\n" in shown, "the rest of the line is shown"
    assert b"bench rows" not in shown


def test_one_rank_is_not_enough():
    with pytest.raises(ConfigError, match="2 or more ranks, got 1"):
        push_pull.run({}, ssh_job.SshPlan(hosts=[Host("a")], ssh=Ssh()))
