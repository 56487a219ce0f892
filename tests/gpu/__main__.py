"""Everything that wants a GPU, in one command: these tests, then ``bpsfast bench device``, whose samples are kept.

    python -m tests.gpu --out bench/results                     # writes device_<gpu>.jsonl
    python -m tests.gpu --device host --out out/gpu             # a rehearsal

Either has a limit, so that what hangs does not take the time of the other. Ends with 1 if anything is not as it should
be.
"""
from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

_TESTS_S, _BENCH_S = 230.0, 250.0


def main() -> int:
    """Run both; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "host"], default="cuda")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to put the bench's result file")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["BPSTEST_DEVICE"] = options.device
    results = options.out / f"device_{name_of(options.device)}.jsonl"
    bench = ["bench", "device", "--device", options.device, "--json", str(results)]
    codes = [run("the tests", _TESTS_S, "pytest", "-q", "--durations=10", "tests/gpu"),
             run("the bench", _BENCH_S, "bpsfast", *bench)]
    print(f"results: {results}")
    return int(any(codes))


def run(what: str, limit_s: float, *command: str) -> int:
    """Run a module of this interpreter for so long at most; return its exit code."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *command], start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{what} did not end within {limit_s:g} s: killed", flush=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        code = 124
    print(f"{what} ended with {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def name_of(device: str) -> str:
    """Return what the device is called in names of files."""
    if device == "host":
        return device
    from bpsfast.gpu.cuda import cupy

    name = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


if __name__ == "__main__":
    raise SystemExit(main())
