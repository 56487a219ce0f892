"""For benchmarks: runs a job whose ranks print their measurements, and collects them."""
from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from bpsfast.orchestration.errors import PeerLostError, StallError

#: Begins the line that a rank prints for the benchmark; libraries may print other lines.
MARK = "bpsfast bench: "


def tell(rank: int, **measured: Any) -> None:
    """Print what *rank* has measured, for `run` in the process that started the job."""
    print(f"{MARK}{json.dumps({'rank': rank, **measured})}", flush=True)


def run(command: Sequence[str], what: str, n_ranks: int, timeout_s: float, **options: Any) -> list[dict[str, Any]]:
    """Run *command*, the launcher of a job; return what its ranks `tell`, by rank.

    *what* describes the job in errors, *options* are those of `subprocess.run`. Raises `StallError` if the job does not
    end within *timeout_s*, `PeerLostError` if it fails or other than *n_ranks* ranks have told something.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    except subprocess.TimeoutExpired as exc:
        raise StallError(f"{what} did not end within {timeout_s:g} s") from exc
    found = [json.loads(line.partition(MARK)[2]) for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or len(found) != n_ranks:
        raise PeerLostError(f"{what} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return sorted(found, key=lambda each: each["rank"])
