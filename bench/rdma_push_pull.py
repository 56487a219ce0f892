"""Compares a push_pull of two nodes over rdma with ``ib_write_bw -b``, in turns, between two devices of one machine.

    python -m tests.guest run --out results -- python -m bpsfast.bench.rdma_push_pull --json '$OUT/rdma_push_pull.json'
    python -m bpsfast.bench.rdma_push_pull --devices mlx5_0,mlx5_1

Each of the two ranks has *--size* bytes. Every byte passes once in each direction, as a partial or a result, so a
push_pull of t seconds moves 2 * size / t bytes a second, which is perftest's figure for both directions together. Ours
is measured with sums and with ``sums=off`` (whose results are wrong), to see the cost of summing. Without perftest only
ours is measured.
"""
from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bpsfast.base.value_formats import parse_size
from bpsfast.bench import rdma_perf
from bpsfast.bench.harness import table
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.rdma_perf import Contestant

_YARDSTICK = Contestant("ib_write_bw -b", "bw", program="ib_write_bw")
_MESSAGE_NBYTES = 4 << 20
#: Settings for an emulated machine, which starts slowly and retransmits late.
_PATIENT: dict[str, Any] = {"start_timeout_s": 300.0, "timeout_s": 120.0, "lease_s": 60.0, "helper_lease_s": 0,
                            "heartbeat_s": 5.0}


def main(arguments: Sequence[str]) -> int:
    """Run the bench."""
    parser = rdma_perf.parser("rdma_push_pull", __doc__)
    parser.add_argument("--devices", default="rxe0,rxe1", help="device of each node (rxe0,rxe1)")
    parser.add_argument("--size", default="64M", help="bytes of each rank (64M)")
    options = parser.parse_args(arguments)
    devices, nbytes = options.devices.split(","), parse_size(options.size) or 0
    if len(devices) != 2 or not nbytes:
        parser.error(f"--devices {options.devices} --size {options.size}: expected two devices, and bytes such as 64M")
    samples = measure(devices, nbytes, options.rounds)
    yardstick = samples.get(_YARDSTICK.name)
    rows = [rdma_perf.summary(name, values, yardstick if name != _YARDSTICK.name else None)
            for name, values in samples.items()]
    print(table.plain([["", "MB/s both ways", "lowest", "highest", f"of {_YARDSTICK.name}"], *map(cells, rows)]))
    rdma_perf.write(options, rows, nbytes=nbytes)
    return 0


def measure(devices: Sequence[str], nbytes: int, n_rounds: int) -> dict[str, list[float]]:
    """Return bytes per second, both directions together, of each contestant and round."""
    samples: dict[str, list[float]] = {}
    more = {f"node{i}": {"BPSFAST_RDMA_DEVICES": f"={name}"} for i, name in enumerate(devices)}
    with ContestantLauncher(2, 2) as launcher:
        jobs = {"push_pull": launcher.bpsfast(more=more, transport="rdma", **_PATIENT),
                "push_pull, sums off": launcher.bpsfast(more=more, transport="rdma", sums="off", **_PATIENT)}
        for _ in range(n_rounds):
            if shutil.which(_YARDSTICK.program):
                value = rdma_perf.theirs(_YARDSTICK, _MESSAGE_NBYTES, devices[1], devices[0], ["-b"])
                samples.setdefault(_YARDSTICK.name, []).append(value)
            for name, job in jobs.items():
                turn = job.measure("numpy", nbytes, 1, 2)
                samples.setdefault(name, []).append(2 * nbytes / statistics.median(turn.samples_s))
                if turn.n_wrong and name == "push_pull":
                    raise RuntimeError(f"{turn.n_wrong} elements are wrong")
    return samples


def cells(found: dict[str, Any]) -> list[str]:
    """Return a row of the printed table."""
    values = [found["median"], min(found["samples"]), max(found["samples"])]
    return [found["name"], *(f"{value / 1e6:.2f}" for value in values),
            f"{found['ratio']:.3f}" if found["ratio"] else ""]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
