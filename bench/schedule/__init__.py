"""``bpsfast bench schedule``: the gain of sending the most urgent tensors first, and of no barrier between steps.

A training job on several machines (network namespaces, links shaped in both directions) sends tensors in order of
arrival or by priority, with or without a barrier at the end of each step. It is compared with torch's DDP over gloo and
scheduled all-reduces over gloo. All have the same weights, data and layer times (`timed_network`); layers sleep instead
of computing, so that two cores only move bytes. `methods` lists the contestants, `trainer` is one rank, `report`
compares the measurements with the simulator for the same layers, links, partitions and credit.

Source: ByteScheduler (SOSP'19) sections 2 and 6; BytePS (OSDI'20) section 5.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.bench.schedule import report
from bpsfast.bench.schedule.methods import METHODS, Setup, start
from bpsfast.launch.namespaces import Cluster
from bpsfast.orchestration.errors import ConfigError

#: Bits/s of all links together, so slow that the work of two cores for ten machines (sums, hooks, weights) is small.
_TOTAL_BITS = 0.2e9
_MODEL, _DIVISOR = "vgg16", 32
_RATIO = 0.75
#: Steps of a turn; the first ones fill the pipeline.
_N_WARMUP, _N_STEPS = 2, 6


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: n_workers (4), n_helpers (2); model ("vgg16/32"); ratio (0.75):
    computing relative to the optimal communication; ways ("fifo|priority, crossing|..."), n_rounds (3),
    json_path, quick. Raises `ConfigError` if one makes no sense, `LackingError` if network namespaces or torch are
    missing.
    """
    given = BenchRun("schedule", options)
    setup = _setup(given)
    names = _names(given.get("ways"), given.quick)
    given.require_links()
    with Cluster(list(setup.machines), rates=dict.fromkeys(setup.machines, setup.rate_bits)) as cluster:
        rate_bytes = cluster.calibrate("node0", "node1").rate_bytes
        setup = setup.computing(rate_bytes)
        with ContestantLauncher(setup.n_workers, setup.n_workers, cluster) as launcher:
            rows = [Row(start(launcher, name, setup), "step", setup.nbytes, label=name) for name in names]
            for row in rows:
                row.group.measure("step", row.nbytes, 0, 1)  # checks its sums once
            alone = Row(rows[0].group, "alone", setup.nbytes, label="alone")
            take_turns([alone], 1, n=_N_STEPS, n_warmup=1)
            phases = alone.group.ask("phases")
            take_turns(rows, given.rounds(3), n=_N_STEPS, n_warmup=_N_WARMUP)
            digests = {row.name: row.group.ask("digest") for row in rows}
        rate_bytes = (rate_bytes + cluster.calibrate("node0", "node1").rate_bytes) / 2
    found = report.Found(setup, rate_bytes, alone, report.slowest(phases), rows, digests)
    print(report.text(found), flush=True)
    return given.finish(report.records(found))


def _setup(given: Mapping[str, Any]) -> Setup:
    model, _, divisor = str(given.get("model") or f"{_MODEL}/{_DIVISOR}").partition("/")
    if divisor and not (divisor.isdecimal() and int(divisor)):
        raise ConfigError(f"--model {given['model']!r}: expected a built-in model and a divisor, such as vgg16/32")
    n_workers, n_helpers = given.get("n_workers") or 4, given.get("n_helpers", 2)
    if n_workers < 2:
        raise ConfigError(f"{n_workers} worker exchanges nothing: bench schedule needs two or more")
    ratio = given.get("ratio") or _RATIO
    setup = Setup(n_workers, n_helpers, model, int(divisor or 1), ratio, _TOTAL_BITS / (n_workers + n_helpers))
    _ = setup.job  # raises for an unknown model
    return setup


def _names(text: str | None, quick: bool) -> list[str]:
    if text is None:
        return [name for name, method in METHODS.items() if method.is_quick or not quick]
    names = text.split("|")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ConfigError(f"--ways {text!r}: {unknown[0]!r} is none of {', '.join(METHODS)}")
    return names
