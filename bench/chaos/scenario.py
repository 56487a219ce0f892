"""What goes wrong in one trial, and what must come of it: drawn from a seed, always the same for the same. Pure."""
from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Class = Literal["undisturbed", "lost helper", "two helpers", "hung helper", "short stop", "lost rank", "lost node",
                "lost scheduler"]

#: Those of which every rank must go on with the bits of a job that nothing happened to; of the others it may also end
#: with an error that names who is lost.
MUST_RECOVER: tuple[Class, ...] = ("undisturbed", "lost helper", "two helpers", "hung helper", "short stop")
MAY_RAISE: tuple[Class, ...] = ("lost rank", "lost node", "lost scheduler")

#: How often a class is drawn, compared to others.
_WEIGHTS: dict[Class, int] = {
    "undisturbed": 1, "lost helper": 6, "two helpers": 2, "hung helper": 2, "short stop": 5, "lost rank": 2,
    "lost node": 2, "lost scheduler": 2}

#: Silence for so long is a loss; a short stop is at most a third of it.
LEASE_S = 3.0
#: A stop that outlasts the lease.
HANG_S = 2 * LEASE_S


@dataclass(frozen=True)
class Fault:
    """At `delay_s` after rank 0 has begun `step` the process `role` is killed, or stopped for `seconds` if not 0."""

    step: int
    delay_s: float
    role: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One trial: a job of machines with `ranks` each and helpers, and its faults, in the order of their steps."""

    seed: int
    kind: Class
    ranks: tuple[int, ...]
    n_helpers: int
    transport: str
    placement: str
    n_steps: int
    faults: tuple[Fault, ...]

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each machine."""
        first, found = 0, []
        for n in self.ranks:
            found.append(tuple(range(first, first + n)))
            first += n
        return tuple(found)


def draw(seed: int) -> Scenario:
    """Return the trial of *seed*."""
    chance = random.Random(seed)
    kind = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    ranks = chance.choice([(1, 1), (2, 1), (1, 1, 1), (2, 2)])
    n_helpers = chance.choice([1, 2, 3]) if kind not in ("two helpers",) else 3
    n_steps = 40
    scenario = Scenario(seed, kind, ranks, n_helpers, chance.choice(["tcp", "auto"]),
                        chance.choice(["optimal", "ps"]), n_steps, ())
    return Scenario(**{**scenario.__dict__, "faults": tuple(_faults(scenario, chance))})


def _faults(scenario: Scenario, chance: random.Random) -> list[Fault]:
    step, delay_s = chance.randrange(5, scenario.n_steps - 10), chance.random() * 0.03
    helpers = [f"helper {i}" for i in range(scenario.n_helpers)]
    everybody = ["scheduler", *helpers, *(f"node {i}" for i in range(len(scenario.ranks))),
                 *(f"rank {i}" for i in range(sum(scenario.ranks)))]
    match scenario.kind:
        case "undisturbed":
            return []
        case "lost helper":
            return [Fault(step, delay_s, chance.choice(helpers))]
        case "two helpers":
            first, second = chance.sample(helpers, 2)
            later_s = chance.choice([0.0, 0.005, 0.02, 0.1])  # at once, or while the job recovers from the first
            return [Fault(step, delay_s, first), Fault(step, delay_s + later_s, second)]
        case "hung helper":
            return [Fault(step, delay_s, chance.choice(helpers), HANG_S)]
        case "short stop":
            return [Fault(step, delay_s, chance.choice(everybody), chance.random() * LEASE_S / 3)]
        case "lost rank":
            return [Fault(step, delay_s, f"rank {chance.randrange(sum(scenario.ranks))}")]
        case "lost node":
            return [Fault(step, delay_s, f"node {chance.randrange(len(scenario.ranks))}")]
        case "lost scheduler":
            return [Fault(step, delay_s, "scheduler")]
