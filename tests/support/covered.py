"""Which lines the tests run: Python's by coverage.py, those of C and Cython by gcov, on this machine and in the guest.

    make coverage                                     # PYTEST adds arguments for both runs

It builds the compiled modules in place with counters, and without them again at the end. Reports are below
out/coverage: ``summary.md`` by folder and file, ``python/index.html`` and ``native/index.html`` by line. Counts of
killed processes are lost, and functions that numba compiles count as not run (see CONTRIBUTING).
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.guest.suites import COVERAGE

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "coverage"
_BUILD, _PLAIN, _GUEST, _RCFILE = OUT / "build", OUT / "plain", OUT / "guest", OUT / "coveragerc"
_FOLDERS = ("bpsfast", "orchestration", "bench")
#: Counters are atomic, because threads share them; pyproject.toml adds -O3 after these flags.
_FLAGS = {"CFLAGS": "--coverage -fprofile-update=atomic", "LDFLAGS": "--coverage"}
#: Counting slows tests down, and changes the instructions that one test checks.
_PYTEST = ("-q", "--timeout=600", "--deselect=tests/bench/test_bench_summation.py::"
           "test_copies_of_the_compiled_modules_are_stored_past_the_caches")
_SETUP = "import setuptools; setuptools.setup()"
_GCOVR = ("--root", str(ROOT), "--filter", "pyx/", "--exclude", r".*\.c$", "--include-internal-functions",
          "--gcov-ignore-errors=no_working_dir_found", "--gcov-ignore-errors=source_not_found")


def build(is_counted: bool) -> None:
    """Build all compiled modules in place, with or without counters."""
    command = [sys.executable, "-c", _SETUP, "--quiet", "build_ext", "--inplace", "--force", "--build-temp"]
    if is_counted:
        subprocess.run([*command, str(_BUILD), "--cython-line-directives"], cwd=ROOT, check=True,
                       env={**os.environ, **_FLAGS})
    else:
        subprocess.run([*command, str(_PLAIN)], cwd=ROOT, check=True)


def settings() -> str:
    """Return coverage.py's settings, with absolute paths because processes of tests run in other folders."""
    source = "".join(f"\n    {ROOT / name}" for name in _FOLDERS)
    return (f"[run]\nsource = {source}\ndata_file = {OUT / 'data'}\nparallel = true\nsigterm = true\n"
            "patch =\n    subprocess\n    _exit\nconcurrency =\n    multiprocessing\n    thread\n"
            "disable_warnings =\n    no-data-collected\n    module-not-measured\n    couldnt-parse\n")


def run(arguments: Sequence[str]) -> bool:
    """Run the tests of this machine, then those of the guest; return whether all passed."""
    counted = [sys.executable, "-m", "coverage", "run", f"--rcfile={_RCFILE}", "-m", "pytest", *_PYTEST, *arguments]
    here = [*counted, "--ignore=tests/guest", "--ignore=tests/gpu", "--numprocesses=2", "--dist=loadfile"]
    there = [sys.executable, "-m", "pytest", *_PYTEST, *arguments, "tests/guest"]
    codes = [subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, COVERAGE: str(_GUEST)}).returncode
             for command in (here, there)]
    return not any(codes)


def report() -> dict[str, list[int]]:
    """Write the reports; return for each file of the project its number of lines and of lines that were run."""
    python = [sys.executable, "-m", "coverage"]
    for arguments in (["combine", str(OUT), *map(str, _GUEST.glob("*/python"))],
                      ["html", "-q", "-d", str(OUT / "python")], ["json", "-q", "-o", str(OUT / "python.json")]):
        subprocess.run([*python, arguments[0], f"--rcfile={_RCFILE}", *arguments[1:]], cwd=ROOT, check=True)
    trees = [_BUILD]
    for folder in _GUEST.glob("*/native"):  # it contains the same tree without the compiler's output
        trees.append(folder / _BUILD.relative_to("/"))
        for notes in _BUILD.rglob("*.gcno"):
            shutil.copy(notes, trees[-1] / notes.relative_to(_BUILD))
    gcovr = [sys.executable, "-m", "gcovr", *_GCOVR]
    traces = []
    for number, tree in enumerate(trees):
        traces += ["--add-tracefile", str(OUT / f"native{number}.json")]
        subprocess.run([*gcovr, "--json", traces[-1], str(tree)], cwd=ROOT, check=True)
    (OUT / "native").mkdir(exist_ok=True)
    subprocess.run([*gcovr, *traces, "--html-details", str(OUT / "native" / "index.html"), "--json-summary",
                    str(OUT / "native.json")], cwd=ROOT, check=True)
    counts = {name: [file["summary"]["num_statements"], file["summary"]["covered_lines"]]
              for name, file in json.loads((OUT / "python.json").read_text())["files"].items()}
    counts |= {file["filename"]: [file["line_total"], file["line_covered"]]
               for file in json.loads((OUT / "native.json").read_text())["files"]}
    return counts


def summary(counts: Mapping[str, Sequence[int]], fewer_than: float = 80.0) -> str:
    """Return a Markdown table by folder, and one of files with *fewer_than* percent of lines run."""
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, (n_lines, n_run) in counts.items():
        folder = str(Path(name).parent)
        folders[folder][0] += n_lines
        folders[folder][1] += n_run
    totals = [sum(each[column] for each in counts.values()) for column in (0, 1)]
    files = {name: each for name, each in counts.items() if each[0] and 100.0 * each[1] / each[0] < fewer_than}

    def table(title: str, rows: Mapping[str, Sequence[int]]) -> list[str]:
        return [f"| {title} | lines | run, % |", "|---|---|---|",
                *(f"| {name} | {n_lines} | {100.0 * n_run / n_lines:.1f} |"
                  for name, (n_lines, n_run) in sorted(rows.items()) if n_lines)]

    return "\n".join([*table("folder", {**folders, "all": totals}), "", f"Files below {fewer_than:g} %:", "",
                      *table("file", files), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run, and always write the reports; return 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="tests.support.covered", description=__doc__.partition("\n")[0])
    parser.add_argument("--pytest", default="", help="arguments for pytest, as one word")
    chosen = parser.parse_args(arguments)
    shutil.rmtree(OUT, ignore_errors=True)
    _GUEST.mkdir(parents=True)
    _RCFILE.write_text(settings())
    try:
        build(is_counted=True)
        passed = run(shlex.split(chosen.pytest))
    finally:
        build(is_counted=False)
    text = summary(report())
    (OUT / "summary.md").write_text(text)
    print(text)
    print(f"line by line: {OUT / 'python' / 'index.html'}, {OUT / 'native' / 'index.html'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
