"""What `roles` must know of the variables of one launcher."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...base.settings import Settings
from ..process_role import ProcessRole

Environ = Mapping[str, str]


class Environment(NamedTuple):
    """One launcher's variables.

    `level`: launchers of a lower level run inside those of a higher one. `marks` returns the variables that show its
    presence, `missing` those that it must set and has not, `place` what they say if none is missing. `echoes` tells
    whether what an incomplete set says follows from a `ProcessRole`: scripts write RANK and its like from what Slurm or MPI
    say.
    """

    name: str
    level: int
    marks: Callable[[Settings, Environ], list[str]]
    missing: Callable[[Settings, Environ], list[str]]
    place: Callable[[Settings, Environ], ProcessRole]
    echoes: Callable[[ProcessRole, Environ], bool] = lambda place, environ: False


def are_set(names: tuple[str, ...], environ: Environ) -> list[str]:
    """Return those of *names* that are set to something."""
    return [name for name in names if environ.get(name, "")]


def are_unset(names: tuple[str, ...], environ: Environ) -> list[str]:
    """Return the others."""
    return [name for name in names if not environ.get(name, "")]


def says(fields: Mapping[str, str], place: ProcessRole, environ: Environ) -> bool:
    """Tell whether all variables of *fields* (to a field of `ProcessRole`) that are set have *place*'s values."""
    return all(environ[name] == str(getattr(place, field)) for name, field in fields.items() if environ.get(name, ""))
