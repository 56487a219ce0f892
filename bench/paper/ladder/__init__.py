"""``bpsfast bench ladder``: the cost of each mistake that an RDMA transport can make, on real networks' gradients.

One worker pushes its whole gradient list, as partitions, and gets all of it back. Half of the bytes are summed on the
other host: the worker writes partitions into a service's slots there, and the service writes each back as soon as it
has arrived. The other half is summed on the worker's own machine, in memory that both sides share, so nothing moves.
This is the row `ours`. Each other row changes one decision (`shares.VARIANTS`), `vanilla` all of them, and `tcp` moves
the same lists over plain sockets.

The native loops (`bpsfast.bench.paper.ladder.exchange`) are the same for all variants, so rows differ only by the
variant. The bench adds a table look-up and a queue entry for each message, and uses one thread on each host for
everything. It omits sums (the service returns its input) and the hand-over of the own share through shared memory,
about a microsecond for each partition.

    shares      variants, partitions, owners  control     messages between the two hosts
    memory      registered areas              device      the RDMA port, queue pairs
    contestant  one variant at one end        report      tables and records
    service, worker                           the two ends
"""
from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bpsfast.base import settings
from bpsfast.bench.harness import table
from bpsfast.bench.paper.ladder import control, report, shares
from bpsfast.bench.paper.ladder.device import Port, usable
from bpsfast.bench.paper.ladder.service import serve
from bpsfast.bench.paper.ladder.shares import VARIANTS
from bpsfast.bench.paper.ladder.worker import Worker
from bpsfast.launch.daemons import reserve_port, terminate, tie_to_parent
from bpsfast.orchestration.errors import ConfigError

_MODELS = "vgg19,resnet50,inception-bn"
_QUICK_DIVISORS = {"vgg19": 256, "resnet50": 64, "inception-bn": 32}
_ROUNDS, _QUICK_ROUNDS = 5, 1
_LOOPBACK = "127.0.0.1"
_END_TIMEOUT_S = 15.0


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records; [] for the end that listens.

    *options*, each of which may be missing or None: peer ("host" or "host:port"; None: both ends on this machine),
    listen (address, "" for all; None: not), port, devices ("A" or "A,B"), models ("vgg19/8,resnet50"), n_rounds (5),
    json_path, quick. Raises `ConfigError` if one makes no sense, `OSError` where there is no RDMA device or no
    libibverbs, and `PeerLostError` or `StallError` if the other end failed or never came.
    """
    given = {name: value for name, value in options.items() if value is not None}
    quick, port = given.get("quick", False), given.get("port", control.PORT)
    devices = [word.strip() for word in given.get("devices", "").split(",") if word.strip()]
    both_here = "peer" not in given and "listen" not in given
    if "peer" in given and "listen" in given:
        raise ConfigError(f"bench ladder either listens or connects to {given['peer']}, not both")
    if len(devices) > (2 if both_here else 1):
        raise ConfigError(f"devices {','.join(devices)}: expected {'A or A,B' if both_here else 'one, of this host'}")
    if "listen" in given:
        serve(given["listen"], port, devices[0] if devices else "")
        return []
    models = shares.parse_models(given.get("models") or _MODELS, _QUICK_DIVISORS if quick else {})
    n_rounds = given.get("n_rounds") or (_QUICK_ROUNDS if quick else _ROUNDS)
    begin = time.time()
    with _other_end(given.get("peer"), port, devices) as (connection, device):
        found = _measure(connection, device, models, n_rounds)
    found[0].update({"options": {k: str(v) for k, v in given.items() if k != "json_path"}, "begin_unix_s": begin,
                     "end_unix_s": time.time()})
    if "json_path" in given:
        table.write(Path(given["json_path"]), found)
    return found


def _measure(connection: control.Control, device: str, models: list[shares.Model],
             n_rounds: int) -> list[dict[str, Any]]:
    """Return the manifest, without times, and all records."""
    loaded = settings.load({})
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(Port(usable(device, loaded.rdma_gid_index, connection.peer)[0]))
        worker = Worker(connection, opened)
        stack.callback(worker.close)
        latency_s = worker.latency_s()
        ends = {"worker": worker.own, "service": worker.peer}
        for name, hello in ends.items():
            print(f"{name}: {hello.device} on {hello.machine['cpu']}, memcpy {hello.memcpy_bytes_per_s / 1e9:.2f} GB/s")
        print(f"8 bytes written with immediate: {latency_s * 1e6:.1f} us one way, both ends polling\n")
        records: list[dict[str, Any]] = [
            {"bench": "ladder", "format": 1, "rungs": {variant.name: variant.about for variant in VARIANTS},
             **{name: {"device": hello.device, **hello.machine} for name, hello in ends.items()},
             "same_kernel": worker.own.boot == worker.peer.boot},
            {"section": "machine", "chosen": {},
             "measured": {"write_8_bytes_s": latency_s,
                          **{f"{name}_memcpy": hello.memcpy_bytes_per_s for name, hello in ends.items()}}}]
        for model in models:
            rows = worker.measure(model, loaded.partition_bytes, n_rounds, lambda text: print(text, file=sys.stderr))
            print(report.block(model, rows))
            print(report.verdict(model, rows)["sentence"] + "\n", flush=True)
            records += report.records(model, rows, n_rounds)
        return records


@contextlib.contextmanager
def _other_end(peer: str | None, port: int, devices: list[str]) -> Iterator[tuple[control.Control, str]]:
    """Yield the connection to the service and the worker's device; without a *peer*, start the service here."""
    found = usable(devices[0] if devices else "", settings.load({}).rdma_gid_index)  # fails before waiting
    if peer is not None:
        host, _, number = peer.partition(":")
        if number and not number.isdecimal():
            raise ConfigError(f"{peer!r}: expected HOST or HOST:PORT")
        with contextlib.closing(control.connect(host, int(number) if number else port)) as connection:
            yield connection, devices[0] if devices else ""
        return
    devices = devices or [rail.name.replace("/", ":") for rail in found[:2]]
    with reserve_port(_LOOPBACK) as reserved:
        at = reserved.getsockname()[1]
        service = subprocess.Popen(tie_to_parent([
            sys.executable, "-m", "bpsfast", "bench", "ladder", "--listen", _LOOPBACK, "--port", str(at),
            "--devices", devices[-1]]), stdin=subprocess.DEVNULL, stdout=2)
        try:
            with contextlib.closing(control.connect(_LOOPBACK, at, lambda: service.poll() is not None)) as connection:
                yield connection, devices[0]
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(_END_TIMEOUT_S)
        finally:
            if service.poll() is None:
                terminate(service)
