"""``bpsfast bench frameworks``: a framework's arrays beside NumPy's, one large tensor and many small ones.

Every row sums the same numbers in the same job, in turns. A framework is a file beside this one with `ROWS`, named in
`rank.FRAMEWORKS`; what is not installed has no row.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bpsfast.base.process_identity import folder_prefix
from bpsfast.bench.harness import table
from bpsfast.launch.daemons import clean_environment
from bpsfast.orchestration.errors import ConfigError, PeerLostError

BASELINE = "numpy"
#: The overhead that a framework's row may have.
TARGET = 0.15


def run(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure as *options* say, print a table, and return (and write) the records.

    Parameters
    ----------
    options
        n_ranks (2, on this machine), n_rounds (10), json_path, quick. All may be missing or None.

    Raises
    ------
    ConfigError
        If an option makes no sense.
    PeerLostError
        If the job fails.
    """
    given = {name: value for name, value in options.items() if value is not None}
    n_ranks = given.get("n_ranks", 2)
    if n_ranks < 1:
        raise ConfigError(f"bench frameworks needs a rank, got {n_ranks}")
    n_rounds = given.get("n_rounds") or (1 if given.get("quick") else 10)
    began = time.time()
    with tempfile.TemporaryDirectory(prefix=folder_prefix("bench")) as folder:
        path = Path(folder, "records")
        environ = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", **clean_environment(os.environ),
                   "OMP_NUM_THREADS": "1"}
        code = subprocess.run([sys.executable, "-m", "bpsfast", "run", "-n", str(n_ranks), "--", sys.executable, "-m",
                               "bpsfast.bench.frameworks.rank", str(path), str(n_rounds)], env=environ,
                              check=False).returncode
        if code:
            raise PeerLostError(f"the job of {n_ranks} ranks that bench frameworks measures ended with exit code "
                                f"{code}: its output above says why")
        records = json.loads(path.read_text())
    print(text(records), flush=True)
    return table.finish("frameworks", given, began, records)


def text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: medians, and how much longer than the baseline's they are."""
    lines = [f"{'workload':20}{'row':16}{'median ms':>12}{'best ms':>10}{'overhead':>10}"]
    for record in records:
        base = next(each for each in records
                    if (each["workload"], each["row"]) == (record["workload"], BASELINE))["median_s"]
        over = record["median_s"] / base - 1
        mark = "  above the target" if over > TARGET and record["row"].partition(",")[0] != BASELINE else ""
        lines.append(f"{record['workload']:20}{record['row']:16}{record['median_s'] * 1e3:12.2f}"
                     f"{record['best_s'] * 1e3:10.2f}{over:+10.0%}{mark}")
    return "\n".join(lines)
