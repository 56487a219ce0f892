"""``bpsfast bench frameworks``: sums of JAX and TensorFlow arrays relative to NumPy's, one large tensor and many small.

Every row sums the same numbers in the same job, in turns. Each framework has a file in this folder with `ROWS`, listed
in `rank.FRAMEWORKS`; a framework that is not installed has no rows.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness.bench_run import BenchRun
from bpsfast.launch.daemons import clean_environment
from bpsfast.orchestration.errors import ConfigError, PeerLostError

BASELINE = "numpy"
#: Overhead that a framework's row may have at most.
TARGET = 0.15


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    *options*, each of which may be missing or None: n_ranks (2, on this machine), n_rounds (10), json_path, quick.
    Raises `ConfigError` if one makes no sense, `PeerLostError` if the job fails.
    """
    given = BenchRun("frameworks", options)
    n_ranks = given.get("n_ranks", 2)
    if n_ranks < 1:
        raise ConfigError(f"bench frameworks needs a rank, got {n_ranks}")
    with tempfile.TemporaryDirectory(prefix=folder_prefix("bench")) as folder:
        path = Path(folder, "records")
        environ = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", **clean_environment(os.environ),
                   "OMP_NUM_THREADS": "1"}
        code = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", str(n_ranks), "--", sys.executable, "-m",
                               "bpsfast.bench.frameworks.rank", str(path), str(given.rounds(10))], env=environ,
                              check=False).returncode
        if code:
            raise PeerLostError(f"the job of {n_ranks} ranks that bench frameworks measures ended with exit code "
                                f"{code}: its output above says why")
        records = json.loads(path.read_text())
    print(text(records), flush=True)
    return given.finish(records)


def text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: medians, and by how much they exceed the baseline's."""
    lines = [f"{'workload':20}{'row':16}{'median ms':>12}{'best ms':>10}{'overhead':>10}"]
    for record in records:
        base = next(each for each in records
                    if (each["workload"], each["row"]) == (record["workload"], BASELINE))["median_s"]
        over = record["median_s"] / base - 1
        mark = "  above the target" if over > TARGET and record["row"].partition(",")[0] != BASELINE else ""
        lines.append(f"{record['workload']:20}{record['row']:16}{record['median_s'] * 1e3:12.2f}"
                     f"{record['best_s'] * 1e3:10.2f}{over:+10.0%}{mark}")
    return "\n".join(lines)
