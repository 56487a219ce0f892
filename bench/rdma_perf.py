"""Compares ``bpsfast perf`` with perftest, in turns, between two devices of one machine.

    python -m tests.guest run --out results -- python -m bpsfast.bench.rdma_perf --json '$OUT/rdma_perf.json'
    python -m bpsfast.bench.rdma_perf --device mlx5_0 --peer mlx5_1

Each round measures every contestant once at each size, so that other load affects all of them. The table has medians
over the rounds and their ratios to perftest; the file holds the raw samples. Both ends of ours are Python processes
that live through the whole bench. perftest's are started for each measurement, and their output is used. Without
perftest (a Debian package) only ours are measured.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bpsfast.base import settings
from bpsfast.bench.harness import machine_info, table
from bpsfast.hardware.host import Host
from bpsfast.hardware.rdma_route import choose
from bpsfast.orchestration import security
from bpsfast.tools.perf import control, perf_plan as plans
from bpsfast.tools.perf.perf_run import PerfRun

_OUR_PORT, _THEIR_PORT = 18610, 18611
_KEY = security.job_key(None, "bench rdma_perf")
_TIMEOUT_S = 60.0
_TURN_NBYTES = 48 << 20
_LAT_ITERATIONS = 1000
_LAT_NBYTES = 8
#: Timeout of 4 s for all contestants, because an emulator may be paused for longer than the default of 67 ms.
_ACK_TIMEOUT = 20


class Contestant(NamedTuple):
    """A perftest program, or one of our operations, and what it measures."""

    name: str
    verb: str
    program: str = ""
    operation: str = ""


BANDWIDTHS = (Contestant("ib_write_bw", "bw", program="ib_write_bw"),
              Contestant("bpsfast write", "bw", operation="write"),
              Contestant("bpsfast write_imm", "bw", operation="write_imm"))
LATENCIES = (Contestant("ib_write_lat", "lat", program="ib_write_lat"),
             Contestant("bpsfast lat write", "lat", operation="write"),
             Contestant("ib_send_lat", "lat", program="ib_send_lat"),
             Contestant("bpsfast lat write_imm", "lat", operation="write_imm"))
#: Our contestant -> the perftest program that it is compared with.
AGAINST = {"bpsfast write": "ib_write_bw", "bpsfast write_imm": "ib_write_bw", "bpsfast lat write": "ib_write_lat",
           "bpsfast lat write_imm": "ib_send_lat"}


def main(arguments: Sequence[str]) -> int:
    """Run the bench, or the other end of our contestants (--serve)."""
    made = parser("rdma_perf", __doc__)
    made.add_argument("--device", default="rxe1", help="device of the sending side (rxe1)")
    made.add_argument("--peer", default="rxe0", help="device of the other side (rxe0)")
    made.add_argument("--sizes", default="65536,262144,1048576,4194304", help="bytes, for bandwidths")
    made.add_argument("--only", choices=["bw", "lat"], help="bandwidths or latencies only")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.serve:
        serve(options.device)
        return 0
    sizes = [int(size) for size in options.sizes.split(",")]
    lineup = [(each, nbytes) for nbytes in sizes for each in BANDWIDTHS] if options.only != "lat" else []
    lineup += [(each, _LAT_NBYTES) for each in LATENCIES] if options.only != "bw" else []
    lineup = [(each, nbytes) for each, nbytes in lineup if not each.program or shutil.which(each.program)]
    samples: dict[tuple[str, int], list[float]] = {}
    with serving(options.peer):
        for round_ in range(options.rounds):
            for each, nbytes in lineup:
                value = (theirs(each, nbytes, options.device, options.peer) if each.program
                         else ours(each, nbytes, options.device))
                samples.setdefault((each.name, nbytes), []).append(value)
                unit = "MB/s" if each.verb == "bw" else "us"
                print(f"# round {round_ + 1}: {each.name} {nbytes}: {value * _SCALE[each.verb]:.2f} {unit}",
                      file=sys.stderr, flush=True)
    rows = []
    for each, nbytes in lineup:
        yardstick = samples.get((AGAINST.get(each.name, ""), nbytes))
        rows.append({"verb": each.verb, "nbytes": nbytes, "against": AGAINST[each.name] if yardstick else None,
                     **summary(each.name, samples[each.name, nbytes], yardstick)})
    print(table.plain([["", "bytes", "median", "lowest", "highest", "against", "ratio"], *map(cells, rows)]))
    write(options, rows)
    return 0


_SCALE = {"bw": 1e-6, "lat": 1e6}


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of ``python -m bpsfast.bench.NAME`` with the options that `write` reads."""
    made = argparse.ArgumentParser(prog=f"python -m bpsfast.bench.{name}", description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=7, help="how often every contestant is measured (7)")
    made.add_argument("--json", metavar="FILE", help="write medians and raw samples here")
    return made


def write(options: argparse.Namespace, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write *rows* to the path in option --json, which may contain environment variables."""
    if options.json:
        Path(os.path.expandvars(options.json)).write_text(json.dumps(
            {"machine": machine_info.describe(), "rounds": options.rounds, **more, "rows": rows}, indent=1) + "\n")


def summary(name: str, values: Sequence[float], yardstick: Sequence[float] | None) -> dict[str, Any]:
    """Return the median of *values*, its ratio to that of *yardstick*, and the samples."""
    median = statistics.median(values)
    return {"name": name, "median": median, "ratio": median / statistics.median(yardstick) if yardstick else None,
            "samples": list(values)}


def cells(found: dict[str, Any]) -> list[str]:
    """Return a row of the printed table: MB/s or us."""
    scale, unit = _SCALE[found["verb"]], "MB/s" if found["verb"] == "bw" else "us"
    values = [found["median"], min(found["samples"]), max(found["samples"])]
    return [found["name"], str(found["nbytes"]), *(f"{value * scale:.2f} {unit}" for value in values),
            found["against"] or "", f"{found['ratio']:.3f}" if found["ratio"] else ""]


def iterations(each: Contestant, nbytes: int) -> int:
    """Return the number of messages in a turn."""
    return _LAT_ITERATIONS if each.verb == "lat" else max(16, min(1000, _TURN_NBYTES // nbytes))


# -- ours --------------------------------------------------------------------------------------------------------

def ours(each: Contestant, nbytes: int, device: str) -> float:
    """Measure one of ours; return bytes per second, or seconds."""
    plan = plans.make(each.verb, {"operation": each.operation, "sizes": (nbytes,), "ack_timeout": _ACK_TIMEOUT,
                                  "iterations": iterations(each, nbytes)})
    loaded = settings.load({"rdma_devices": f"={device}"}, {})
    with control.connect("127.0.0.1", _OUR_PORT, _KEY, _TIMEOUT_S, _TIMEOUT_S) as connection:
        run = PerfRun(connection, _KEY, loaded, lambda row: None)
        run.as_client(plan, lambda: None)
    return run.rows[0]["average_bytes_per_s" if each.verb == "bw" else "typical_s"]


def serve(device: str) -> None:
    """Serve our contestants as the other end, until SIGTERM."""
    loaded = settings.load({"rdma_devices": f"={device}"}, {})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with control.listen(_OUR_PORT, "127.0.0.1") as listener:
        while True:
            with control.accept(listener, _KEY, 86400.0, _TIMEOUT_S) as connection:
                PerfRun(connection, _KEY, loaded, lambda row: None).as_server({}, lambda: None)


@contextmanager
def serving(device: str) -> Iterator[None]:
    """Run `serve` in a process of its own."""
    child = subprocess.Popen([sys.executable, "-m", "bpsfast.bench.rdma_perf", "--serve", "--device", device])
    try:
        yield
    finally:
        child.terminate()
        child.wait(_TIMEOUT_S)


# -- perftest ----------------------------------------------------------------------------------------------------

def theirs(each: Contestant, nbytes: int, device: str, peer: str, more: Sequence[str] = ()) -> float:
    """Run perftest with options *more*; return bytes per second, or seconds (t_typical)."""
    common = [each.program, "-s", str(nbytes), "-n", str(iterations(each, nbytes)), "-F", "-p", str(_THEIR_PORT), *more,
              "-u", str(_ACK_TIMEOUT), *(["--report_gbits"] if each.verb == "bw" else [])]
    server = subprocess.Popen([*common, "-d", peer, "-x", str(gid_index(peer))], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    try:
        await_listener(_THEIR_PORT, server)
        done = subprocess.run([*common, "-d", device, "-x", str(gid_index(device)), "127.0.0.1"], capture_output=True,
                              text=True, timeout=_TIMEOUT_S, check=True)
        server.wait(_TIMEOUT_S)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    numbers = next(line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(nbytes)])
    return float(numbers[3]) * 1e9 / 8 if each.verb == "bw" else float(numbers[4]) / 1e6


def gid_index(device: str) -> int:
    """Return the GID index that ours would use."""
    gid = choose(Host(), settings.Settings(rdma_devices=f"={device}")).require()[0].gid
    return gid.index if gid else 0


def await_listener(port: int, server: subprocess.Popen) -> None:
    """Wait until *server* listens on *port*, without connecting to it (it serves one client only)."""
    wanted = f":{port:04X} "
    deadline = time.monotonic() + _TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        if any(wanted in f"{line.split()[1]} " and line.split()[3] == "0A" for line in lines[1:]):
            return
        time.sleep(0.02)
    raise RuntimeError(f"perftest's server does not listen on port {port} (exit status {server.poll()})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
