"""``bpsfast bench compressed``: the time of a training step on slow links with each codec, and the bytes that travel.

Machines with a rank each are network namespaces whose links carry 100 Mbit/s each way. Each codec has a job of its own
(one job would place all its sums together). The jobs take turns, and compute by sleeping. Bytes are those that the
kernel counted on the links. `step` is the step of one rank, `report` compares the measurements with the planner
(`orchestration.placement.codec_choice`).
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bpsfast.base.settings import Settings
from bpsfast.bench.compressed import report
from bpsfast.bench.compressed.report import PARTITION_NBYTES, UNCOMPRESSED, Found
from bpsfast.bench.compressed.step import variant
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.launcher import SLOW_CONTROL_PLANE, ContestantLauncher
from bpsfast.bench.harness.option_lists import parse_counts
from bpsfast.bench.harness.samples import Row, take_turns_on_links
from bpsfast.launch.namespaces import Cluster
from bpsfast.node import capacity
from bpsfast.tools.planner import catalog
from bpsfast.tools.planner.prediction import parse

CODECS = ("topk:k=0.01,error_feedback", "randomk:k=0.01,error_feedback", "onebit", "onebit:error_feedback",
          "int8:error_feedback", "float16")
_QUICK = ("topk:k=0.01,error_feedback", "onebit")
_MODEL = "resnet18"
_RATE_MBIT = 100.0
_COMPUTE_S = 0.1
#: In flight to one peer: enough to keep a link busy, and little enough that an urgent partition does not wait long.
_CREDIT_NBYTES = 2 * PARTITION_NBYTES


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    *options*, each of which may be missing or None: machines ("2,4"), codecs (separated by "|", as `bpsfast plan
    --compression` takes them), model ("resnet18"), rate_mbit (100), compute_s (0.1 a step), n_rounds (3), json_path,
    quick. Raises `ConfigError` if one makes no sense, `LackingError` where no network namespaces can be made.
    """
    given = BenchRun("compressed", options)
    codecs = given["codecs"].split("|") if "codecs" in given else list(_QUICK if given.quick else CODECS)
    for text in codecs:
        parse(text)
    counts = parse_counts("machines", given.get("machines", "2" if given.quick else "2,4"), 16)
    model = catalog.load(given.get("model", _MODEL))
    given.require_links()
    rate_bits, compute_s = given.get("rate_mbit", _RATE_MBIT) * 1e6, given.get("compute_s", _COMPUTE_S)
    records: list[dict[str, Any]] = []
    for n in counts:
        names = [f"node{i}" for i in range(n)]
        with Cluster(names, rates=dict.fromkeys(names, rate_bits)) as cluster, \
                ContestantLauncher(n, n, cluster) as launcher:
            found = Found(model, n, compute_s, cluster.calibrate("node0", "node1").rate_bytes,
                          capacity.measure_copy_rate(capacity.n_summing_threads(Settings())))
            found.rows = [
                Row(launcher.bpsfast(transport="tcp", partition_bytes=PARTITION_NBYTES, credit_bytes=_CREDIT_NBYTES,
                                     **SLOW_CONTROL_PLANE),
                    variant(model.name, text, compute_s), model.nbytes, label=text or UNCOMPRESSED)
                for text in ("", *codecs)]
            found.sent = take_turns_on_links(found.rows, cluster, given.rounds(3))
        print(report.text(found), flush=True)
        records += report.records(found)
    return given.finish(records)
