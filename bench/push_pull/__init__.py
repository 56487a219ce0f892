"""``bpsfast bench push_pull``: the time of a push_pull, how near it is to the bound, and the time of other libraries.

One node: `one_machine`. Two nodes: `two_nodes`. Real hosts: `over_hosts`. All contestants are measured in turns within
one run; compare ratios of one run, not times of two runs.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsfast.bench.harness import peers
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.option_lists import parse_names, parse_sizes
from bpsfast.bench.push_pull import mpi_environments, one_machine, over_hosts, paired, two_nodes
from bpsfast.bench.push_pull.options import Plan
from bpsfast.launch import ssh_job
from bpsfast.orchestration.errors import ConfigError

_SIZES = {1: "8:256M", 2: "64M:64M"}
_QUICK_SIZES = {1: "4K,64K,1M,16M,64M", 2: "64M:64M"}
_APIS = {"numpy": ("numpy",), "torch": ("torch",), "both": ("numpy", "torch")}


def run(options: Mapping[str, Any], hosts: ssh_job.SshPlan | None = None) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    *options*, each of which may be missing or None: n_ranks, n_nodes (1 or 2), compare
    ("gloo,mpi,mpich,impi"), sizes ("8:256M": every power of two; or "4K,1M"), api (numpy, torch, both), json_path,
    quick. *hosts*: where the ranks run, if not on this machine; it then has n_ranks and n_nodes. Raises `ConfigError`
    if an option makes no sense.
    """
    given = BenchRun("push_pull", options)
    n_ranks, n_nodes, quick = given.get("n_ranks", 2), given.get("n_nodes", 1), given.quick
    if hosts is not None:
        n_ranks, n_nodes = sum(hosts.shape.ranks), len(hosts.shape.ranks)
    elif n_nodes not in _SIZES:
        raise ConfigError(f"bench push_pull plays 1 or 2 nodes on this machine, got {n_nodes}; -H names real ones")
    if n_ranks < 2:
        raise ConfigError(f"bench push_pull measures 2 or more ranks, got {n_ranks}")
    if given.get("dtype", "float32") != "float32":
        raise ConfigError(f"bench push_pull sums float32, got {given['dtype']} (bench kernels has all dtypes)")
    played = 1 if hosts is not None else n_nodes
    wanted = parse_sizes(given.get("sizes") or (_QUICK_SIZES if quick else _SIZES)[played])
    operations = _operations(given.get("api", "both"), n_nodes)
    chosen, libraries = _peers(given.get("compare") or "")
    new = [each for each in libraries if each not in peers.VARIANTS]
    if new and (hosts is not None or n_nodes != 1):
        raise ConfigError(f"compare {', '.join(new)}: only on one machine, by ranks that both libraries start")
    if hosts is not None:
        if set(chosen) - {"gloo"}:
            raise ConfigError(f"compare {', '.join(chosen)}: between hosts it is gloo that is compared with")
        records = over_hosts.run(Plan(wanted, n_ranks, operations[:1], chosen, quick), hosts)
    elif n_nodes == 1:
        plan = Plan(wanted, n_ranks, operations, chosen, quick, libraries=libraries)
        records = one_machine.run(plan)
        if libraries:
            records += paired.run(plan, libraries)
    else:
        records = two_nodes.run(Plan(wanted, n_ranks, operations, chosen, quick))
    return given.finish(records)


def _operations(api: str, n_nodes: int) -> tuple[str, ...]:
    if api not in _APIS:
        raise ConfigError(f"api {api!r}: expected {', '.join(_APIS)}")
    operations = _APIS[api]
    if "torch" in operations and peers.missing("gloo") is not None:
        print("torch is not installed: its operations are left out")
        operations = ("numpy",)
    return operations if n_nodes == 1 else operations[:1]


def _peers(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the peers with processes of their own, and the MPI libraries whose processes are ours, too."""
    found, libraries = [], []
    known = dict.fromkeys((*peers.VARIANTS, *mpi_environments.NAMES))
    for name in parse_names("--compare", text, known) if text else ():
        lacking = peers.missing(name) if name in peers.VARIANTS else mpi_environments.missing(name)
        if lacking is not None:
            print(lacking)
            continue
        found += [name] if name in peers.VARIANTS else []
        libraries += [name] if name in mpi_environments.NAMES else []
    return tuple(found), tuple(libraries)
