"""``bpsfast bench device``: measures how several ranks that share a GPU exchange gradients.

`PARTS` answer these questions:

    sums      how near is push_pull to plain copies of the same bytes (`copies` explains the bound)
    backward  is the computing stream slower, or does the host wait, while hooks push gradients
    stages    how do copies, sums and the network overlap in one step of two nodes
    training  does a real model end with the same bits as with sums on the CPU
    memory    how much device, pinned and machine memory does a byte of gradient need

With ``--device host`` everything runs on the host device, without a GPU. That only shows that the code works; its
result files are no claims.
"""
from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import Any

from bpsfast.bench.device import report
from bpsfast.bench.device.parts import PARTS, record
from bpsfast.bench.device.plan import Plan
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.bench.harness.option_lists import parse_names, parse_sizes
from bpsfast.orchestration.errors import ConfigError

_SIZES = {"cuda": "1M,4M,16M,64M,256M", "host": "1M,4M"}
_QUICK_SIZES = {"cuda": "1M,16M,64M", "host": "1M"}


def run(options: Mapping[str, Any]) -> bool:
    """Measure as *options* say, print tables, write the records; return whether everything is as promised.

    A part that fails is reported, and the others are still measured. Each part rewrites the result file.

    *options*, each of which may be missing or None: device ("cuda", "host"), n_ranks (2, all on one device), sizes
    ("1M,64M"), parts ("sums,memory"), settings (of the jobs), n_rounds (5), json_path, quick. Raises `ConfigError` if
    one makes no sense, `UnsupportedError` if there is no GPU.
    """
    given = BenchRun("device", options)
    device, n_ranks = given.get("device", "cuda"), given.get("n_ranks", 2)
    if device not in _SIZES:
        raise ConfigError(f"--device {device}: expected {' or '.join(_SIZES)}")
    if n_ranks < 2:
        raise ConfigError(f"bench device measures ranks that share a device: it needs 2 or more, got {n_ranks}")
    if device == "cuda":
        from bpsfast.gpu.cuda import cupy

        cupy()
    plan = Plan(device, n_ranks, parse_sizes(given.get("sizes") or (_QUICK_SIZES if given.quick else _SIZES)[device]),
                given.rounds(5, quick=2), given.quick, given.get("settings", {}))
    records: list[dict[str, Any]] = []
    for name in parse_names("--parts", given["parts"], PARTS) if "parts" in given else PARTS:
        found = _measured(name, plan)
        print(report.text(found), flush=True)
        records += found
        given.finish(records)
    troubles = report.troubles(records, plan.is_gpu)
    for trouble in troubles:
        print(f"not as promised: {trouble}")
    if not plan.is_gpu:
        print("measured on the host device: it runs; nothing is claimed of a GPU")
    return not troubles


def _measured(name: str, plan: Plan) -> list[dict[str, Any]]:
    began = time.monotonic()
    try:
        found = PARTS[name](plan)
    except Exception:  # of any kind: the other parts do not depend on it
        found = [record("error", {"part": name}, {"error": traceback.format_exc()})]
    for each in found:
        each["chosen"]["part_s"] = time.monotonic() - began
    return found
