"""``bpsfast bench ddp``: torch's backends "bpsfast" and gloo compared, in programs that differ only in the backend.

Two models train with DistributedDataParallel: one has many weights and computes little, the other is the opposite.
Their losses must agree bit for bit. Then it times single collectives. `models` and `collectives` have the programs,
`member` is one rank of one backend, `report` makes the tables.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bpsfast.bench.ddp import report
from bpsfast.bench.ddp.collectives import COLLECTIVES
from bpsfast.bench.ddp.models import MODELS
from bpsfast.bench.harness import peers
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.launcher import ContestantLauncher
from bpsfast.bench.harness.option_lists import parse_names, parse_sizes
from bpsfast.bench.harness.samples import Row, take_turns
from bpsfast.orchestration.errors import ConfigError, LackingError

BACKENDS = ("gloo", "bpsfast")
_SIZES = "1K,16K,256K,4M,64M"
_QUICK_SIZES = "1K,1M"
#: Steps of a turn. Gradients are averages of the ranks' batches, so two ranks have only one order of addition.
_N_STEPS, _N_WARMUP = 8, 1
#: Calls in a turn for the largest tensors.
_MOST_NBYTES, _MOST_TIMES = 96 << 20, 100


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print tables, and return (and write) the records.

    *options*, each of which may be missing or None: n_ranks (2, on this machine); sizes ("1K,1M") and operations
    ("all_reduce,broadcast", "" for none) of the collectives; n_rounds (5), json_path, quick. Raises `ConfigError` if
    one makes no sense, `LackingError` if torch is missing.
    """
    given = BenchRun("ddp", options)
    quick, n_ranks = given.quick, given.get("n_ranks", 2)
    if n_ranks < 2:
        raise ConfigError(f"bench ddp compares how ranks exchange: it needs 2 or more, got {n_ranks}")
    wanted = parse_sizes(given.get("sizes") or (_QUICK_SIZES if quick else _SIZES))
    operations: Sequence[str] = COLLECTIVES
    if "operations" in given:  # "" means none
        operations = parse_names("--operations", given["operations"], COLLECTIVES) if given["operations"] else ()
    if peers.missing("gloo") is not None:
        raise LackingError("bench ddp needs torch: pip install torch")
    n_rounds = given.rounds(5)
    with ContestantLauncher(n_ranks, 1) as launcher:
        groups = [launcher.torch_group(backend) for backend in BACKENDS]
        steps = [Row(group, model, found.nbytes, label=model) for model, found in MODELS.items() for group in groups]
        take_turns(steps, n_rounds, n=2 if quick else _N_STEPS, n_warmup=_N_WARMUP)
        losses = {group.name: group.ask("losses") for group in groups}
        rows = [Row(group, operation, nbytes) for operation in operations for nbytes in wanted for group in groups]
        for nbytes in wanted * n_rounds:
            n = max(2, min(_MOST_TIMES, _MOST_NBYTES // nbytes))
            take_turns([row for row in rows if row.nbytes == nbytes], 1, n=n, n_warmup=2)
    print(report.text(steps, losses, rows), flush=True)
    return given.finish(report.records(steps, losses, rows, n_ranks))
