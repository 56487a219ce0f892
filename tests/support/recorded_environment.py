"""What launchers really set, one file for each start in tests/environments: which process, on which machine, with what.

    [machines]           name = number
    [all]                VARIABLE=value, of every rank
    [2 on node3]         what rank 2 has besides
"""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "environments"
KEY = "c0ffee42" * 8


class Rank(NamedTuple):
    """One process: its machine's number, its variables."""

    machine: int
    environ: dict[str, str]


class Recorded(NamedTuple):
    """One start: the machines' numbers by name, the ranks in order."""

    machines: dict[str, int]
    ranks: list[Rank]

    @property
    def layout(self) -> list[list[int]]:
        """The ranks of each machine that has some, in the order of their first."""
        found: dict[int, list[int]] = {}
        for rank, each in enumerate(self.ranks):
            found.setdefault(each.machine, []).append(rank)
        return list(found.values())


def names() -> list[str]:
    """Return the names of all files."""
    return sorted(path.stem for path in FOLDER.glob("*.env"))


def read(name: str) -> Recorded:
    """Return what the file *name* holds, and the key that a user adds to a job of several machines."""
    sections: dict[str, dict[str, str]] = {}
    for line in (FOLDER / f"{name}.env").read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            variable, _, value = line.partition("=")
            section[variable.strip()] = value.strip()
    machines = {machine: int(number) for machine, number in sections.pop("machines").items()}
    common = sections.pop("all") | ({"BPSFAST_JOB_KEY": KEY} if len(machines) > 1 else {})
    ranks = []
    for rank, (title, variables) in enumerate(sections.items()):
        number, _, machine = title.partition(" on ")
        assert int(number) == rank
        ranks.append(Rank(machines[machine], common | variables))
    return Recorded(machines, ranks)
