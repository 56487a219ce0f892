"""The bench between hosts, by an agent of this machine: what its ranks print, and what of it are rows."""
from __future__ import annotations

from bpsfast.bench import over_hosts
from bpsfast.bench.plan import Plan
from bpsfast.launch import over_ssh
from bpsfast.launch.hosts import Host
from bpsfast.launch.ssh import Ssh

_SIZES = (4096, 8192)


def test_rows_are_known_among_what_libraries_print(tmp_path, capfdbinary, no_leaks):
    (tmp_path / "sitecustomize.py").write_text("import atexit\nprint('no end of line', end=' ', flush=True)\n"
                                               "atexit.register(print, 'goodbye')")
    hosts = over_ssh.Plan(hosts=(Host("localhost", 2),), ssh=Ssh(), variables={"PYTHONPATH": str(tmp_path)})
    said: list[str] = []
    records = over_hosts.run(Plan(_SIZES, 2, ("numpy",), (), quick=True, say=said.append), hosts)
    assert [record["chosen"]["nbytes"] for record in records] == list(_SIZES)
    assert [record["measured"]["n_wrong"] for record in records] == [0, 0]
    assert len(said) == 1
    shown = capfdbinary.readouterr().out
    assert b"[rank 0] no end of line goodbye\n" in shown, "the rest of the line is shown"
    assert b"bench rows" not in shown
