"""One trial of `bench worker_loss` with torchft: the same training and the same schedule, summed by torchft over gloo.

No replica is started again: only the loss is measured. Every wait of torchft has a timeout, so nothing hangs.
"""
from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bpsfast.launch.daemons import clean_environment, tie_to_parent
from bpsfast.orchestration.errors import BpsError, StallError

from .training import N_RANKS, Progress
from .trial import Trial, await_ends, draw, judge, strike

_TIMEOUT_S = 30.0
#: Contestant -> options of torchft's lighthouse, which decides who takes part in a step. The first are those of
#: torchft's README, where a silent replica counts as lost after 5 s; the others make it quick.
LIGHTHOUSES = {
    "torchft": {"join_timeout_ms": 10_000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5000},
    "torchft, short timeouts": {"join_timeout_ms": 100, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 500},
}


def missing() -> str | None:
    """Return why torchft cannot be measured here, or None."""
    lacking = [name for name in ("torch", "torchft") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed (pip install bpsfast[ecosystem])" if lacking else None


def run(contestant: str, index: int, folder: Path) -> Trial:
    """Run trial *index* with the lighthouse of *contestant*; outputs are in *folder*. As `trial.run`."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule = draw(index)
    paths = [folder / f"rank_{rank}.jsonl" for rank in range(N_RANKS)]
    progress = [Progress.create(path.with_suffix(".progress")) for path in paths]
    processes: list[subprocess.Popen[bytes]] = []

    def start(module: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        command = tie_to_parent([sys.executable, "-m", f"{__package__}.{module}", *arguments])
        with log.open("ab") as output:
            processes.append(subprocess.Popen(command, env={**clean_environment(os.environ), "OMP_NUM_THREADS": "1"},
                                              stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT))
        return processes[-1]

    try:
        lighthouse = start("lighthouse", folder / "lighthouse.log", str(folder / "address"),
                           json.dumps({"min_replicas": 2, **LIGHTHOUSES[contestant]}))
        address = _address(lighthouse, folder / "address")
        replicas = [start("replica", path.with_suffix(".log"), str(path), str(rank), address, str(_TIMEOUT_S))
                    for rank, path in enumerate(paths)]
        struck_s, phase = strike(progress[schedule.victim], [replicas[schedule.victim]], schedule, signal.SIGKILL)
        trouble = await_ends({f"replica {rank}": process for rank, process in enumerate(replicas)
                              if rank != schedule.victim})
    except BpsError as exc:
        return Trial(contestant, index, "rank", schedule.victim, trouble=str(exc))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return judge(Trial(contestant, index, "rank", schedule.victim, phase, trouble=trouble), paths, struck_s,
                 tells_losses=False)


def _address(lighthouse: subprocess.Popen[bytes], path: Path) -> str:
    """Return what *lighthouse* writes to *path*."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if lighthouse.poll() is not None or time.monotonic() > deadline:
            raise StallError(f"torchft's lighthouse has not begun within {_TIMEOUT_S:g} s, or has ended: "
                             f"{lighthouse.poll()}")
        time.sleep(0.01)
    return path.read_text()
