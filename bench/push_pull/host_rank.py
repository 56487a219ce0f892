"""One rank of ``bpsfast bench push_pull -H``: measures on real hosts, in turns with gloo; rank 0 prints the rows.

    python -m bpsfast.bench.push_pull.host_rank JSON       {"sizes": [bytes], "n_rounds": 3, "peers": ["gloo"]}

Where a bench on one machine has a coordinator that asks all processes, these ranks keep step by their own barriers, and
learn how long the slowest one took by a push_pull of the times.
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
from bpsfast.base.settings import parse_address
from bpsfast.bench.harness import samples
from bpsfast.bench.harness.bpsfast_rank import BpsfastRank
from bpsfast.bench.harness.contestant import Timer
from bpsfast.bench.harness.peers import Gloo
from bpsfast.launch.daemons import reserve_port

#: What the line of the rows begins with; libraries may print others.
ROWS_MARK = "bpsfast bench rows: "


def main(arguments: Sequence[str]) -> int:
    """Be one rank from `init` to `shutdown`."""
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
    """Return the samples of each contestant at one size, taken in turns."""
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
    """Return for each operation how long the slowest rank took, seconds."""
    return [float(slowest) for slowest in _of_all(samples_s).max(axis=0)]


def _of_all(numbers: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the *numbers* of all ranks, a row each."""
    table = np.zeros((bpsfast.size(), len(numbers)))
    table[bpsfast.rank()] = numbers
    return np.array(bpsfast.push_pull(table, average=False, name=f"of all {len(numbers)}"))


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Yield the variables by which gloo's ranks meet, on the network that ours use; the port is kept meanwhile."""
    host = parse_address(os.environ["BPSFAST_SCHEDULER"])[0]
    port = np.zeros(1)
    with contextlib.ExitStack() as stack:
        if bpsfast.rank() == 0:
            port[0] = stack.enter_context(reserve_port(host)).getsockname()[1]  # torch's store binds beside it
        yield _variables(host, port)


def _variables(host: str, port: np.ndarray[Any, Any]) -> dict[str, str]:
    port = bpsfast.broadcast(port, root_rank=0, name="port of gloo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing: which of our addresses is on the way there?
        own = sock.getsockname()[0]
    interface = next(name for name, entries in psutil.net_if_addrs().items()
                     if any(entry.address == own for entry in entries))
    return {"MASTER_ADDR": host, "MASTER_PORT": str(int(port[0])), "RANK": str(bpsfast.rank()),
            "WORLD_SIZE": str(bpsfast.size()), "GLOO_SOCKET_IFNAME": interface}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
