"""``bpsfast bench compressed``: the time of a training step on slow links with each codec, and the bytes that travel.

Machines with a rank each are network namespaces whose links carry 100 Mbit/s each way. Each codec has a job of its own
(one job would place all its sums together); they take turns, and computing is slept. Bytes are those that the kernel
counted on the links.
`step` is what a rank does, `report` puts what was measured beside what the planner says
(`orchestration.placement.codec_choice`).
"""
from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bpsfast.base.settings import Settings
from bpsfast.bench.compressed import report
from bpsfast.bench.compressed.report import PARTITION_NBYTES, UNCOMPRESSED, Found
from bpsfast.bench.compressed.step import variant
from bpsfast.bench.harness import table
from bpsfast.bench.harness.contestant_group import Group
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.launch.namespaces import Cluster, netns
from bpsfast.node import capacity
from bpsfast.orchestration.errors import ConfigError, LackingError
from bpsfast.tools.planner import catalog
from bpsfast.tools.planner.prediction import parse

CODECS = ("topk:k=0.01,error_feedback", "randomk:k=0.01,error_feedback", "onebit", "onebit:error_feedback",
          "int8:error_feedback", "float16")
_QUICK = ("topk:k=0.01,error_feedback", "onebit")
_MODEL = "resnet18"
_RATE_MBIT = 100.0
_COMPUTE_S = 0.1
#: Enough under way to one peer that no link is idle, little enough that what is urgent need not wait long.
_CREDIT_NBYTES = 2 * PARTITION_NBYTES
#: The control plane may be slow to hear of anything here: two cores hold dozens of processes.
_PATIENT = {"heartbeat_s": 2.0, "lease_s": 30.0, "helper_lease_s": 0}


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    Parameters
    ----------
    options
        machines ("2,4"), codecs (codecs with "|" between them, as `bpsfast plan --compression` takes them), model
        ("resnet18"), rate_mbit (100), compute_s (0.1 a step), n_rounds (3), json_path, quick. All may be missing or
        None.

    Raises
    ------
    ConfigError
        If an option makes no sense.
    LackingError
        If network namespaces cannot be made here.
    """
    given = {name: value for name, value in options.items() if value is not None}
    quick = bool(given.get("quick"))
    codecs = given["codecs"].split("|") if "codecs" in given else list(_QUICK if quick else CODECS)
    for text in codecs:
        parse(text)
    counts = _counts(given.get("machines", "2" if quick else "2,4"))
    model = catalog.load(given.get("model", _MODEL))
    lacking = netns.missing()
    if lacking is not None:
        raise LackingError(f"bench compressed needs machines with links of their own: {lacking}")
    rate_bits, compute_s = given.get("rate_mbit", _RATE_MBIT) * 1e6, given.get("compute_s", _COMPUTE_S)
    n_rounds = given.get("n_rounds") or (1 if quick else 3)
    began = time.time()
    records: list[dict[str, Any]] = []
    for n in counts:
        names = [f"node{i}" for i in range(n)]
        with Cluster(names, rates=dict.fromkeys(names, rate_bits)) as cluster, \
                ContestantLauncher(n, n, cluster) as launcher:
            found = Found(model, n, compute_s, cluster.calibrate("node0", "node1").rate_bytes,
                          capacity.measure_copy_rate(capacity.n_summing_threads(Settings())))
            found.rows = [Row(_start(launcher), variant(model.name, text, compute_s), model.nbytes,
                              label=text or UNCOMPRESSED) for text in ("", *codecs)]
            _measure(found, cluster, n_rounds)
        print(report.text(found), flush=True)
        records += report.records(found)
    return table.finish("compressed", given, began, records)


def _start(launcher: ContestantLauncher) -> Group:
    return launcher.bpsfast(transport="tcp", partition_bytes=PARTITION_NBYTES, credit_bytes=_CREDIT_NBYTES, **_PATIENT)


def _measure(found: Found, cluster: Cluster, n_rounds: int) -> None:
    """Let all rows take turns, and count what each machine's link sends in a step."""
    before: list[int] = []

    def around(row: Row, begins: bool) -> None:
        now = [machine.traffic().tx for machine in cluster]
        if begins:
            before[:] = now
        else:
            n_steps = row.n_warmup + row.n_per_round
            found.sent[row.name].append([(after - then) / n_steps for after, then in zip(now, before)])

    for row in found.rows:
        found.sent[row.name] = []
    take_turns(found.rows, n_rounds, n=2, n_warmup=1, around=around)


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in str(text).split(",")]
    if not all(2 <= n <= 16 for n in counts):
        raise ConfigError(f"machines {text!r}: expected counts from 2 to 16 such as 2,4")
    return counts
