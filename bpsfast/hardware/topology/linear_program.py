"""Linear programs with named variables, solved by SciPy's HiGHS."""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from ...orchestration.errors import BpsError, ConfigError

#: The part of the best value that may be lost when the next goal is optimized.
_SLACK = 1e-9
#: The advice if there is no solver.
MISSING = "scipy is missing: pip install 'bpsfast[plan]'"


def can_solve() -> bool:
    """Whether SciPy is installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        return False
    return True


class LinearProgram:
    """A linear program. Variables are non-negative and created on first use. Not thread-safe."""

    def __init__(self) -> None:
        self._columns: dict[Hashable, int] = {}
        self._rows: list[tuple[Mapping[Hashable, float], float, bool]] = []

    def at_most(self, terms: Mapping[Hashable, float], limit: float) -> None:
        """Require that the sum of *terms* (variable: factor) is at most *limit*."""
        self._add(terms, limit, False)

    def equal(self, terms: Mapping[Hashable, float], value: float) -> None:
        """Require that the sum of *terms* is *value*."""
        self._add(terms, value, True)

    def _add(self, terms: Mapping[Hashable, float], value: float, exact: bool) -> None:
        for name in terms:
            self._columns.setdefault(name, len(self._columns))
        self._rows.append((dict(terms), value, exact))

    def least(self, *goals: Mapping[Hashable, float]) -> dict[Hashable, float]:
        """Return the variables' values that minimize the first goal, among these the second, and so on.

        Raises `ConfigError` if SciPy is missing, `BpsError` if no values meet the requirements.
        """
        values: dict[Hashable, float] = {}
        for number, goal in enumerate(goals):
            values = self._solve(goal)
            if number + 1 < len(goals):
                best = sum(factor * values[name] for name, factor in goal.items())
                self.at_most(goal, best + _SLACK * max(1.0, abs(best)))
        return values

    def _solve(self, goal: Mapping[Hashable, float]) -> dict[Hashable, float]:
        try:
            from scipy.optimize import linprog
            from scipy.sparse import coo_array
        except ImportError as exc:
            raise ConfigError(f"the best use of a machine's links is a linear program, for which {MISSING}") from exc
        costs = [0.0] * len(self._columns)
        for name, factor in goal.items():
            costs[self._columns[name]] = factor
        matrices: dict[bool, tuple[Any, list[float]]] = {}
        for exact in (False, True):
            rows = [(terms, value) for terms, value, is_exact in self._rows if is_exact is exact]
            cells = [(factor, number, self._columns[name]) for number, (terms, _) in enumerate(rows)
                     for name, factor in terms.items()]
            if rows:
                factors, lines, columns = zip(*cells)
                shape = len(rows), len(self._columns)
                matrices[exact] = coo_array((factors, (lines, columns)), shape=shape).tocsr(), [v for _, v in rows]
        (a_ub, b_ub), (a_eq, b_eq) = (matrices.get(exact, (None, None)) for exact in (False, True))
        found = linprog(costs, A_ub=a_ub, b_ub=b_ub, A_eq=a_eq, b_eq=b_eq, method="highs")
        if not found.success:
            raise BpsError(f"no use of the machine's links is possible: {found.message}")
        return {name: float(found.x[column]) for name, column in self._columns.items()}
