"""Fuzzes parsers of peers' bytes, guided by coverage: ``python -m tests.support.fuzzing [SECONDS]``, or ``make fuzz``.

The seconds are divided between the C targets of `tests/native/fuzz` (clang's libFuzzer, AddressSanitizer and UBSan) and
the parsers in Python (`tests.support.fuzzed_parsers`, atheris). It prints a table and keeps crashing inputs.
"""
from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support import fuzz_seeds, sanitized
from tests.support.fuzzed_parsers import PARSERS

PROGRAMS = tuple(sorted(path.stem for path in (sanitized.NATIVE / "fuzz").glob("*.c") if path.stem != "driver"))
_MOST_NBYTES = 2048
#: Folder of inputs that crashed.
KEPT = sanitized.ROOT / "out" / "fuzz"


class Outcome(NamedTuple):
    """Result of one target: `crash` is the path of the kept input, or ""."""

    target: str
    n_runs: int
    n_edges: int
    n_paths: int
    crash: str


def build(name: str, folder: Path) -> Path:
    """Build a C target with clang's fuzzer."""
    clang = shutil.which("clang")
    if clang is None:
        raise sanitized.Unavailable("clang is missing (package clang; make fuzz installs it)")
    program = folder / name
    sanitized.build([clang, "-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-fno-sanitize-recover=all",
                     "-fsanitize=fuzzer,address,undefined", "-I", sanitized.ROOT / "pyx",
                     sanitized.NATIVE / "fuzz" / f"{name}.c", "-o", program, "-lpthread"])
    return program


def fuzz(name: str, command: list[str], seconds: float, folder: Path) -> Outcome:
    """Run one target for *seconds*, from its seeds, in its *folder*."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    fuzz_seeds.write(name, corpus)
    KEPT.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={max(1, round(seconds))}", f"-max_len={_MOST_NBYTES}", "-timeout=20", "-len_control=0",
               "-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={KEPT}/{name}-", str(corpus)]
    done = subprocess.run([*command, *options], cwd=sanitized.ROOT, capture_output=True, text=True, errors="replace",
                          timeout=seconds + 300, check=False)
    said = done.stderr + done.stdout
    counts = re.findall(r"^#(\d+)\s.*?(?:cov: (\d+) )?ft: (\d+) ", said, re.MULTILINE) or [("0", "0", "0")]
    runs = re.search(r"stat::number_of_executed_units: (\d+)|Done (\d+) runs", said)
    kept = re.search(r"Test unit written to (\S*(?:crash|timeout|oom|leak)-\S+)", said)
    crash = kept[1] if kept else f"ended with {done.returncode}" if done.returncode else ""
    if crash:
        print(said[-6000:], flush=True)
    return Outcome(name, int((runs[1] or runs[2]) if runs else counts[-1][0]), int(counts[-1][1] or 0),
                   len(list(corpus.iterdir())), crash)


def main(seconds: float) -> int:
    """Fuzz everything, *seconds* in all; return how many targets crashed."""
    share = seconds / (len(PROGRAMS) + len(PARSERS))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="bpsfast-fuzz-") as name:
        folder = Path(name)
        commands = {each: [str(build(each, folder))] for each in PROGRAMS}
        commands |= {each: [sys.executable, "-m", "tests.support.fuzzed_parsers", each] for each in PARSERS}
        print(f"{'target':20}{'executions':>12}{'edges':>8}{'inputs':>8}  crash", flush=True)
        for target, command in commands.items():
            outcomes.append(fuzz(target, command, share, folder / f"{target}.files"))
            row = outcomes[-1]
            print(f"{row.target:20}{row.n_runs:>12}{row.n_edges:>8}{row.n_paths:>8}  {row.crash or '-'}", flush=True)
    n_crashes = sum(bool(each.crash) for each in outcomes)
    print(f"{sum(each.n_runs for each in outcomes)} executions in {seconds:g} s, {n_crashes} crashes", flush=True)
    return n_crashes


if __name__ == "__main__":
    try:
        sys.exit(1 if main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0) else 0)
    except sanitized.Unavailable as exc:
        sys.exit(str(exc))
