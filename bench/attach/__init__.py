"""``bpsfast bench push_pull --attach``: what a running job moves, read from its nodes' exporters, changing nothing.

Two looks at the counters with a pause between them: goodput of each rank, wire throughput of each direction, sums, and
CPU time of each node's process. The job needs the setting `metrics_port`.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bpsfast.bench import table
from bpsfast.bench.attach import exposition
from bpsfast.bench.attach.exposition import Sample
from bpsfast.orchestration.errors import ConfigError

_SECONDS = 10.0


def run(options: Mapping[str, Any], pause: Callable[[float], None] = time.sleep) -> list[dict[str, Any]]:
    """Look at the nodes as *options* say, print a table, and return (and write) the records.

    Parameters
    ----------
    options
        attach ("host:port,host:port"), seconds (10), json_path; all but the first may be missing or None. Of others
        only quick and dtype, which say nothing here, may be given.
    pause
        What waits between the two looks.

    Raises
    ------
    ConfigError, PeerLostError
        See `exposition.fetch`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    others = given.keys() & {"n_ranks", "n_nodes", "compare", "sizes"}
    if others:
        raise ConfigError(f"--attach only reads what a job does by itself: leave out {', '.join(sorted(others))}")
    addresses = [address.strip() for address in given["attach"].split(",") if address.strip()]
    if not addresses:
        raise ConfigError("--attach '': expected HOST:PORT of the nodes' metrics_port")
    began = time.time()
    before = [_look(address) for address in addresses]
    pause(given.get("seconds", _SECONDS))
    after = [_look(address) for address in addresses]
    records = []
    for address, (first_s, first), (last_s, last) in zip(addresses, before, after):
        records += _records(address, last_s - first_s, first, last)
    print(report(records))
    asked = {name: given[name] for name in ("attach", "seconds", "json_path") if name in given}
    return table.finish("attach", asked, began, records)


def _look(address: str) -> tuple[float, list[Sample]]:
    samples = exposition.fetch(address)
    return time.monotonic(), samples


def _records(address: str, elapsed_s: float, first: Sequence[Sample], last: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return a record of the node, and one of each rank of it. A counter that is new began at 0."""
    known = {(each.name, *sorted(each.labels.items())): each.value for each in first}
    grown = [Sample(each.name, each.labels, each.value - known.get((each.name, *sorted(each.labels.items())), 0.0))
             for each in last if each.name.endswith("_total")]

    def rate(name: str, **labels: str) -> float:
        return sum(each.value for each in grown if each.name == f"bpsfast_{name}_total"
                   and labels.items() <= each.labels.items()) / elapsed_s

    node = {"sent": rate("sent_bytes"), "received": rate("received_bytes"), "published": rate("published_bytes"),
            "summed": rate("summed_bytes"), "cpu_share": rate("node_cpu_seconds")}
    number = next((each.labels["node"] for each in last if "node" in each.labels), "?")
    records = [{"section": "node", "chosen": {"address": address, "node": number},
                "measured": {"elapsed_s": elapsed_s, **node}}]
    for rank in sorted({each.labels["rank"] for each in last if each.name == "bpsfast_pushed_bytes_total"}, key=int):
        steps = rate("steps", rank=rank)
        records.append({"section": "rank", "chosen": {"address": address, "node": number, "rank": rank}, "measured": {
            "elapsed_s": elapsed_s, "pushed": rate("pushed_bytes", rank=rank), "steps": steps,
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
