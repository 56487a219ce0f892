"""``bpsfast bench push_pull --attach``: the traffic of a running job, read from its nodes' exporters.

It reads the counters twice and reports the goodput of each rank, wire throughput in each direction, sums, and CPU time
of each node's process. The job needs the setting `metrics_port`.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsfast.base.settings import parse_address
from bpsfast.bench.harness import table
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.orchestration.errors import ConfigError, PeerLostError
from bpsfast.orchestration.host_lookup import format_address
from bpsfast.tools.top.scrape import NotBpsfastError, Scrape, check, scrape

_SECONDS = 10.0
_TIMEOUT_S = 10.0
#: Accepted options, and the command-line spelling of others whose name differs from it.
_READ = ("attach", "seconds", "json_path", "quick", "dtype")
_NAMES = {"n_ranks": "--num-ranks", "n_nodes": "--nodes", "hosts_text": "-H", "assigned": "-x",
          "ssh_options": "--ssh-option"}


def run(options: Mapping[str, Any], pause: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Read the nodes' counters, print a table, and return (and write) the records.

    *options*: attach ("host:port,host:port"), seconds (10), json_path; all but the first may be missing or None. Of the
    other options only quick and dtype, which have no effect here, may be given. *pause* waits between the two reads.
    Raises `ConfigError` if an address is wrong, if the process there is no node of bpsfast, or if prometheus_client is
    not installed, and `PeerLostError` if no node answers.
    """
    given = BenchRun("attach", {name: options.get(name) for name in ("attach", "seconds", "json_path")})
    others = [name for name, value in options.items() if value and name not in _READ]
    if others:
        shown = sorted(_NAMES.get(name, f"--{name.replace('_', '-')}") for name in others)
        raise ConfigError(f"--attach only reads what a job does by itself: leave out {', '.join(shown)}")
    addresses = [address.strip() for address in given["attach"].split(",") if address.strip()]
    if not addresses:
        raise ConfigError("--attach '': expected HOST:PORT of the nodes' metrics_port")
    places = [parse_address(address, "--attach") for address in addresses]
    check()
    before = [_look(*place) for place in places]
    pause(given.get("seconds", _SECONDS))
    records = []
    for address, place, first in zip(addresses, places, before):
        records += _records(address, first, _look(*place))
    print(report(records))
    return given.finish(records)


def _look(host: str, port: int) -> Scrape:
    try:
        return scrape(host, port, _TIMEOUT_S)
    except NotBpsfastError as exc:
        raise ConfigError(f"{exc}: expected a node's metrics_port (BPSFAST_METRICS_PORT)") from exc
    except OSError as exc:
        raise PeerLostError(f"no node answers at {format_address(host, port)}: {exc}; does its job run with "
                            "metrics_port (BPSFAST_METRICS_PORT)?") from exc


def _records(address: str, first: Scrape, last: Scrape) -> list[dict[str, Any]]:
    """Return a record of the node, and one for each of its ranks. A counter that is new began at 0."""
    elapsed_s = last.time_s - first.time_s

    def rate(name: str, **labels: str) -> float:
        full = f"bpsfast_{name}_total"
        return (last.sum(full, **labels) - first.sum(full, **labels)) / elapsed_s

    node = {"sent": rate("sent_bytes"), "received": rate("received_bytes"), "published": rate("published_bytes"),
            "summed": rate("summed_bytes"), "cpu_share": rate("node_cpu_seconds")}
    number = str(last.node)
    records = [{"section": "node", "chosen": {"address": address, "node": number},
                "measured": {"elapsed_s": elapsed_s, **node}}]
    for rank in sorted((each.labels["rank"] for each in last.all("bpsfast_pushed_bytes_total")), key=int):
        records.append({"section": "rank", "chosen": {"address": address, "node": number, "rank": rank}, "measured": {
            "elapsed_s": elapsed_s, "pushed": rate("pushed_bytes", rank=rank), "steps": rate("steps", rank=rank),
            "exposed_share": rate("exposed_seconds", rank=rank)}})
    return records


def report(records: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of nodes and ranks, at most 80 columns wide."""
    nodes = [["Gbit/s", "sent", "received", "sum inputs", "results", "CPU of the node"]]
    ranks = [["rank", "goodput Gbit/s", "steps/s", "in calls"]]
    for record in records:
        measured, chosen = record["measured"], record["chosen"]
        if record["section"] == "node":
            nodes.append([f"node {chosen['node']}, {chosen['address']}",
                          *(f"{8 * measured[name] / 1e9:.3f}" for name in ("sent", "received", "summed", "published")),
                          f"{100 * measured['cpu_share']:.0f} %"])
        else:
            ranks.append([f"{chosen['rank']} (node {chosen['node']})", f"{8 * measured['pushed'] / 1e9:.3f}",
                          f"{measured['steps']:.1f}", f"{100 * measured['exposed_share']:.0f} %"])
    return f"{table.plain(nodes)}\n\n{table.plain(ranks)}"
