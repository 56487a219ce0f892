"""Searches for data races: ``python -m tests.support.races [SECONDS]``, or ``make races``.

It runs the C programs of `tests/native/races`, SECONDS each, then tests of the package's threads with compiled modules
built for ThreadSanitizer. Every race is printed, and is a failure.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import sanitized

PROGRAMS = tuple(sorted(path.stem for path in (sanitized.NATIVE / "races").glob("*.c")))
#: Modules that have threads, or share memory with threads.
MODULES = ("dispatch", "engine", "pace", "perf", "port", "ring", "tcp")
#: Tests within one process, because ThreadSanitizer sees no other, and tests to leave out, with reasons.
TESTS = (
    "test_pipelined_transfer", "test_engine", "test_engine_lifecycle", "test_engine_rows", "test_engine_store",
    "test_lags", "test_pace", "test_port", "test_ring", "test_sends_at_once", "test_tcp",
)
#: They start processes, which import the modules as they are installed: the sanitizer sees their system calls, and not
#: what orders them.
LEFT_OUT = ("a_helper_keeps_to_its_limit", "a_stream_that_is_garbage")


def run_program(program: Path, seconds: float, folder: Path, to_the_first: bool = False) -> str:
    """Run a C program, or *to_the_first* race; return its output. Raises `AssertionError` with the races."""
    report = folder / f"{program.name}.report"
    command = [*sanitized.fixed_addresses(), program, f"{seconds}"]
    environ = sanitized.race_environment(dict(os.environ), report)
    environ["TSAN_OPTIONS"] += f" halt_on_error={int(to_the_first)}"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60 + 10 * seconds, check=False)
    found = sanitized.findings(report)
    assert done.returncode == 0 and not found, f"{program.name} ended with {done.returncode}\n{done.stderr}{found}"
    return done.stdout.strip()


def build_modules(folder: Path) -> None:
    """Build all modules for ThreadSanitizer."""
    for name in MODULES:
        sanitized.race_module(name, folder)


def run_tests(names: Sequence[str], modules: Path, folder: Path, timeout_s: float) -> str:
    """Run these test files with the *modules* of that folder; return pytest's last line. Raises as `run_program`."""
    report = folder / f"{names[0]}.report"
    environ = {**sanitized.race_environment(dict(os.environ), report),
               "LD_PRELOAD": sanitized.runtime(sanitized.compiler("tsan"), "tsan")}
    files = [str(next((sanitized.ROOT / "tests").rglob(f"{name}.py"))) for name in names]
    command = [*sanitized.fixed_addresses(), sys.executable, "-m", "tests.support.raced_modules", modules, *files,
               "-k", " and ".join(f"not {word}" for word in LEFT_OUT),
               # The sanitizer makes each test several times slower.
               "--timeout", f"{timeout_s}", "-o", "faulthandler_timeout=0"]
    done = subprocess.run(command, cwd=sanitized.ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s,
                          check=False)
    found = sanitized.findings(report)
    said = f"{names} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0 and not found, said + found
    return done.stdout.strip().splitlines()[-1]


def main(seconds: float) -> int:
    """Run everything; return how many parts found a race."""
    n_bad = 0
    with tempfile.TemporaryDirectory(prefix="bpsfast-races-") as name:
        folder = Path(name)
        build_modules(folder)
        tasks = {program: lambda program=program: run_program(sanitized.race_program(program, folder), seconds, folder)
                 for program in PROGRAMS}
        tasks |= {test: lambda test=test: run_tests([test], folder, folder, 600) for test in TESTS}
        for task, run in tasks.items():
            try:
                print(f"{task:24}{run()}", flush=True)
            except AssertionError as exc:
                print(f"{task:24}{exc}", flush=True)
                n_bad += 1
    return n_bad


if __name__ == "__main__":
    try:
        sys.exit(1 if main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0) else 0)
    except sanitized.Unavailable as exc:
        sys.exit(str(exc))
