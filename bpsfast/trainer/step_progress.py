"""How far a step has come: which gradients are ready, and which units are whole with them."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from ..orchestration.errors import BusyError
from .unit import Unit


class StepProgress:
    """The step that goes on, of gradients *names*. Any thread asks; `enter` and `end` under its owner's lock."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._ready: set[str] = set()
        self._left: dict[str, int] = {}  # by unit that some are ready of: how many are not

    @property
    def has_begun(self) -> bool:
        """Whether some are ready."""
        return bool(self._ready)

    def is_ready(self, name: str) -> bool:
        """Whether *name* is."""
        return name in self._ready

    def missing(self) -> list[str]:
        """Return the names that are not ready."""
        return [name for name in self._names if name not in self._ready]

    def is_whole(self, unit: Unit) -> bool:
        """Whether all of *unit* are ready."""
        return self._left.get(unit.name) == 0

    def refuse_twice(self, name: str) -> None:
        """Raise `BusyError` if *name* is ready."""
        if name in self._ready:
            raise BusyError(f"gradient {name!r} is ready for the second time in one step: end the step by step() first")

    def enter(self, name: str, unit: Unit, gather: Callable[[], None] = lambda: None) -> bool:
        """Note that *name*, of *unit*, is ready, after *gather*; return whether *unit* is whole now.

        Raises as `refuse_twice`, and as *gather*; then nothing was noted.
        """
        self.refuse_twice(name)
        gather()
        self._ready.add(name)
        self._left[unit.name] = left = self._left.get(unit.name, len(unit.members)) - 1
        return left == 0

    def end(self) -> None:
        """Begin the next step."""
        self._ready.clear()
        self._left.clear()
