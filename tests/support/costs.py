"""The list of slow tests, `costly.txt`, from measurements of a whole run of the suite.

    make test-thorough PYTEST="--junitxml=out/junit.xml"
    python -m tests.support.costs out/junit.xml       # writes costly.txt; the last of several reports counts

A run has a portion of the listed tests (see `tests.support.portions`). Other tests always run: new ones until the list
is written again, and tests of the whole tree, because any change can break them.
"""
from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

#: A test is listed if its cases take at least this long on average, on two cores with two tests at a time.
COSTLY_S = 1.0
#: Tests of the whole tree.
_OF_THE_TREE = ("tests/project/test_layers.py::",)
_PATH = Path(__file__).with_name("costly.txt")


def function_of(name: str) -> str:
    """Return the node id of a case without the case's own values."""
    return name.partition("[")[0]


def read(path: Path = _PATH) -> frozenset[str]:
    """Return the node ids of the test functions in the list *path*."""
    return frozenset(line.split()[1] for line in path.read_text().splitlines() if line)


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Return for each test function of *reports* (in JUnit's format) the average seconds of its cases.

    For functions in several reports the last report counts.
    """
    averages: dict[str, float] = {}
    for report in reports:
        seconds: dict[str, list[float]] = defaultdict(list)
        for case in ET.parse(report).getroot().iter("testcase"):
            module, name = case.get("classname"), case.get("name")
            if not module or not name or case.find("skipped") is not None:
                continue
            parts = module.split(".")
            n_folders = next(i for i, part in enumerate(parts) if part.startswith(("test_", "suite_")))
            path = "/".join(parts[:n_folders + 1]) + ".py"
            seconds[function_of("::".join([path, *parts[n_folders + 1:], name]))].append(float(case.get("time", 0)))
        averages |= {name: sum(times) / len(times) for name, times in seconds.items()}
    return averages


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the list from the named reports."""
    parser = argparse.ArgumentParser(prog="tests.support.costs", description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, help="of whole runs: pytest --junitxml")
    parser.add_argument("--out", type=Path, default=_PATH)
    chosen = parser.parse_args(arguments)
    costs = measured(chosen.reports)
    chosen.out.write_text("".join(f"{costs[name]:6.1f} {name}\n" for name in sorted(costs)
                                  if costs[name] >= COSTLY_S and not name.startswith(_OF_THE_TREE)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
