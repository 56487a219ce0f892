"""One rank of ``bpsfast bench push_pull -H``: measures on real hosts, in turns with gloo; rank 0 prints the rows.

    python -m bpsfast.bench.push_pull.host_rank JSON       {"sizes": [bytes], "n_rounds": 3, "peers": ["gloo"]}

A bench on one machine has a coordinator for all processes. These ranks have none: they use barriers of their own, and
exchange their times by push_pull to find the slowest rank.
"""
from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

import bpsfast
from bpsfast.base.addresses import family_of
from bpsfast.base.settings import parse_addresses
from bpsfast.bench.harness import samples
from bpsfast.bench.harness.bpsfast_rank import BpsfastRank
from bpsfast.bench.harness.contestant import Timer
from bpsfast.bench.harness.peers import Gloo
from bpsfast.launch.daemons import reserve_port

#: Prefix of the line with the rows; libraries may print other lines.
ROWS_MARK = "bpsfast bench rows: "


def main(arguments: Sequence[str]) -> int:
    """Run one rank from `init` to `shutdown`."""
    options = json.loads(arguments[0])
    ours = BpsfastRank()
    timers = {"numpy": Timer(ours)}
    gloo = None
    if "gloo" in options["peers"]:
        with rendezvous() as variables:
            os.environ.update(variables)
            gloo = Gloo()
        timers["gloo"] = Timer(gloo)
    rows = [row for nbytes in options["sizes"] for row in _measure(timers, nbytes, options["n_rounds"])]
    if ours.rank == 0:
        print(f"{ROWS_MARK}{json.dumps({'rows': rows})}", flush=True)
    if gloo is not None:
        gloo.close()
    ours.close()
    return 0


def _measure(timers: Mapping[str, Timer], nbytes: int, n_rounds: int) -> list[dict[str, Any]]:
    """Measure the contestants at one size in turns; return the samples of each."""
    n = samples.batch(nbytes)
    rows: list[dict[str, Any]] = [{"variant": name, "nbytes": nbytes, "n_per_round": n, "n_warmup": max(1, n // 10),
                                   "samples_s": [], "n_wrong": 0} for name in timers]
    for _ in range(n_rounds):
        for row in rows:
            answer = timers[row["variant"]].measure(row["variant"], nbytes, row["n_warmup"], n)
            row["samples_s"] += _slowest(answer["samples_s"])
            row["n_wrong"] = int(_of_all([answer["n_wrong"]]).sum())
    return rows


def _slowest(samples_s: Sequence[float]) -> list[float]:
    """Return the seconds of the slowest rank for each operation."""
    return [float(slowest) for slowest in _of_all(samples_s).max(axis=0)]


def _of_all(numbers: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the *numbers* of all ranks, a row for each rank."""
    table = np.zeros((bpsfast.size(), len(numbers)))
    table[bpsfast.rank()] = numbers
    return np.array(bpsfast.push_pull(table, average=False, name=f"of all {len(numbers)}"))


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Yield the environment variables of gloo's rendezvous, on the network of our ranks; the port stays reserved."""
    host, _ = parse_addresses(os.environ["BPSFAST_SCHEDULER"])[0]
    port = np.zeros(1)
    with contextlib.ExitStack() as stack:
        if bpsfast.rank() == 0:
            port[0] = stack.enter_context(reserve_port(host)).getsockname()[1]  # torch's store can bind to it, too
        yield _variables(host, port)


def _variables(host: str, port: np.ndarray[Any, Any]) -> dict[str, str]:
    port = bpsfast.broadcast(port, root_rank=0, name="port of gloo")
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing, but selects our address of this route
        own = sock.getsockname()[0]
    interface = next(name for name, entries in psutil.net_if_addrs().items()
                     if any(entry.address == own for entry in entries))
    return {"MASTER_ADDR": host, "MASTER_PORT": str(int(port[0])), "RANK": str(bpsfast.rank()),
            "WORLD_SIZE": str(bpsfast.size()), "GLOO_SOCKET_IFNAME": interface}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
