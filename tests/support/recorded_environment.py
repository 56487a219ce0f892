"""Environments set by real launchers: a file for each start in tests/environments, with machines and ranks' variables.

    [machines]           name = number
    [all]                VARIABLE=value, for every rank
    [2 on node3]         additional variables of rank 2
"""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "environments"
KEY = "c0ffee42" * 8


class Rank(NamedTuple):
    """One process: the number of its machine, and its variables."""

    machine: int
    environ: dict[str, str]


class Recorded(NamedTuple):
    """One start: the machines' numbers by name, the ranks in order."""

    machines: dict[str, int]
    ranks: list[Rank]

    @property
    def layout(self) -> list[list[int]]:
        """Return the ranks of each machine with ranks, in the order of the first rank."""
        found: dict[int, list[int]] = {}
        for rank, each in enumerate(self.ranks):
            found.setdefault(each.machine, []).append(rank)
        return list(found.values())


def names() -> list[str]:
    """Return the names of all files."""
    return sorted(path.stem for path in FOLDER.glob("*.env"))


def read(name: str) -> Recorded:
    """Return the contents of file *name*, with the key that a user adds for several machines."""
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
