"""Draws the faults of one `bench chaos` trial, and its required outcome, from a seed. Pure.

The kinds are shuffled: of `CYCLE` consecutive seeds each kind gets its share (`_FREQUENCIES`).
"""
from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Literal

Class = Literal["undisturbed", "lost helper", "two helpers", "hung helper", "short stop", "cut link",
                "reset connections", "refused data", "refused control", "lost host", "foreign helper",
                "absent helper", "lost scheduler", "hung scheduler", "lost rank", "lost node",
                "lost worker, shrink", "lost worker, wait", "rejoining worker", "survived rank", "survived node",
                "survived several", "survived first host"]

#: How often each kind occurs in `CYCLE` consecutive trials.
_FREQUENCIES: dict[Class, int] = {
    "undisturbed": 1, "lost helper": 3, "two helpers": 2, "hung helper": 1, "short stop": 2, "cut link": 2,
    "reset connections": 3, "refused data": 2, "refused control": 2, "lost host": 1, "foreign helper": 1,
    "absent helper": 1, "lost rank": 1, "lost node": 1, "lost scheduler": 3, "hung scheduler": 1,
    "lost worker, shrink": 3, "lost worker, wait": 3, "rejoining worker": 3, "survived rank": 3, "survived node": 3,
    "survived several": 4, "survived first host": 2}
CYCLE = sum(_FREQUENCIES.values())
#: Kinds in which the job may also end with an error that names who is lost; in all others every rank must go on with
#: the bits of an undisturbed job.
MAY_RAISE: tuple[Class, ...] = ("lost rank", "lost node")
MUST_RECOVER = tuple(kind for kind in _FREQUENCIES if kind not in MAY_RAISE)
#: Kinds with two machines, in which the fault is on the link between them.
ON_A_LINK: tuple[Class, ...] = ("cut link", "reset connections", "refused data", "refused control", "lost host")
#: Kinds of elastic jobs, and their policy for lost workers. All of them have a quorum.
LOST_WORKER: dict[Class, str] = {"lost worker, shrink": "shrink", "lost worker, wait": "wait",
                                 "rejoining worker": "wait"}
#: Kinds of elastic jobs that go on without a lost worker, until its replacement joins.
GOES_ON: tuple[Class, ...] = ("rejoining worker",)
#: Kinds of jobs that go on without lost ranks (the setting on_worker_loss).
SURVIVED: tuple[Class, ...] = ("survived rank", "survived node", "survived several", "survived first host")
#: Kinds in which the scheduler is lost for good, and another one takes over at the next address.
MOVED: tuple[Class, ...] = ("survived first host",)
#: Kinds in which the job must have gone on without a process.
_ALWAYS_MISSED: tuple[Class, ...] = ("lost helper", "two helpers", "lost host", *SURVIVED)

#: A process that is silent for this time is lost; a short stop or cut takes at most a third of it.
LEASE_S = 3.0
#: The lease of helpers in trials of the kinds "hung helper" and "lost host"; elsewhere it is `LEASE_S`.
HELPER_LEASE_S = 1.0
#: A firewall refuses for at least this time (more than a heartbeat, so that something is refused), and at most for
#: this time (more than a second, less than the lease).
LEAST_REFUSED_S, MOST_REFUSED_S = 0.25 * LEASE_S, 0.6 * LEASE_S
#: The number of steps that the job trains after the last fault.
N_STEPS_AFTER = 10
#: The role of a fault on the link, and of a helper of another version.
LINK, FOREIGNER = "link", "foreigner"
#: A stop that outlasts the lease.
HANG_S = 2 * LEASE_S


@dataclass(frozen=True)
class Fault:
    """One fault, `delay_s` after rank 0 has begun `step` or after the fault before.

    The process `role` is killed, or stopped for `seconds` if that is not 0; with `restarts` it is killed, and started
    again after `seconds`; with `moves` it is killed for good, and the next scheduler started after `seconds`. For the
    role `LINK`: nothing from the machines `senders` arrives for `seconds`; or `n_resets` connections are reset in the
    middle of a transfer; or a firewall resets and refuses for `seconds` what is `refused` ("data", or "control":
    connections to the scheduler); or the link is cut and the helpers behind it are killed `for_good`.
    """

    step: int
    delay_s: float
    role: str
    seconds: float = 0.0
    senders: tuple[str, ...] = ()
    n_resets: int = 0
    restarts: bool = False
    refused: str = ""
    for_good: bool = False
    moves: bool = False


@dataclass(frozen=True)
class Scenario:
    """One trial: a job of machines with `ranks` each and helpers, and its faults, in the order of their steps."""

    seed: int
    kind: Class
    ranks: tuple[int, ...]
    n_helpers: int
    transport: str
    placement: str
    faults: tuple[Fault, ...]

    @property
    def n_steps(self) -> int:
        """The least number of steps: some after the last fault."""
        return N_STEPS_AFTER + max((fault.step for fault in self.faults), default=0)

    @property
    def n_recoveries(self) -> int:
        """The least number of recoveries; two losses in a row may be one recovery."""
        return int(self.kind in _ALWAYS_MISSED)

    @property
    def absent(self) -> tuple[str, ...]:
        """The processes that the job expects and that are never started."""
        return ("helper 0",) if self.kind == "absent helper" else ()

    @property
    def killed(self) -> set[str]:
        """The processes that are killed, and not started again."""
        if any(fault.for_good for fault in self.faults):
            return {f"helper {i}" for i in range(self.n_helpers)}
        return {fault.role for fault in self.faults
                if fault.moves or (not fault.seconds and not fault.restarts)} - {LINK, FOREIGNER}

    @property
    def lost_ranks(self) -> set[int]:
        """The ranks that the job goes on without: those that are killed, and all of a machine whose node is."""
        found = {int(role.split()[1]) for role in self.killed if role.startswith("rank")}
        return found.union(*(ranks for i, ranks in enumerate(self.machines) if f"node {i}" in self.killed))

    @property
    def lost_nodes(self) -> set[str]:
        """The nodes that the job goes on without: all of their ranks are lost."""
        return {f"node {i}" for i, ranks in enumerate(self.machines) if self.lost_ranks.issuperset(ranks)}

    @property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each machine."""
        first, found = 0, []
        for n in self.ranks:
            found.append(tuple(range(first, first + n)))
            first += n
        return tuple(found)

    def machine_of(self, process: str) -> str:
        """Return the end of the link on which *process* runs: "b" for odd nodes, or for all helpers of a lost host."""
        role, _, number = process.partition(" ")
        if self.kind == "lost host":
            return "b" if role == "helper" else "a"
        if role == "rank":
            number = str(next(i for i, ranks in enumerate(self.machines) if int(number) in ranks))
        return "b" if role != "scheduler" and int(number) % 2 else "a"

    def names_of(self, process: str) -> tuple[str, ...]:
        """Return what an error may call *process* when it is lost: its own name, or the node that it is, or is on."""
        role, _, number = process.partition(" ")
        if role == "rank":
            return process, f"node {next(i for i, ranks in enumerate(self.machines) if int(number) in ranks)}"
        return (process, f"node {len(self.ranks) + int(number)}") if role == "helper" else (process,)


def draw(seed: int) -> Scenario:
    """Return the trial of *seed*."""
    chance = random.Random(seed)
    kinds = [kind for kind, n in _FREQUENCIES.items() for _ in range(n)]
    random.Random(f"deck {seed // CYCLE}").shuffle(kinds)
    kind = kinds[seed % CYCLE]
    ranks = chance.choice([(1, 1), (2, 1), (1, 1, 1), (2, 2)])
    n_helpers = chance.choice([1, 2, 3]) if kind != "two helpers" else 3
    if kind in LOST_WORKER:
        n_helpers = 0
    if kind in MOVED:  # a majority is left
        ranks = chance.choice([(1, 1, 1), (2, 1, 1)])
    scenario = Scenario(seed, kind, ranks, n_helpers, chance.choice(["tcp", "auto"]),
                        chance.choice(["optimal", "ps"]), ())
    return dataclasses.replace(scenario, faults=tuple(_faults(scenario, chance)))


def _faults(scenario: Scenario, chance: random.Random) -> list[Fault]:
    step, delay_s = chance.randrange(5, 30), chance.random() * 0.03
    helpers = [f"helper {i}" for i in range(scenario.n_helpers)]
    everybody = ["scheduler", *helpers, *(f"node {i}" for i in range(len(scenario.ranks))),
                 *(f"rank {i}" for i in range(sum(scenario.ranks)))]
    match scenario.kind:
        case "undisturbed" | "absent helper":
            return []
        case "lost helper":
            return [Fault(step, delay_s, chance.choice(helpers))]
        case "two helpers":
            first, second = chance.sample(helpers, 2)
            later_s = chance.choice([0.0, 0.005, 0.02, 0.1])  # at once, or while the job recovers from the first
            return [Fault(step, delay_s, first), Fault(step, later_s, second)]
        case "hung helper":
            return [Fault(step, delay_s, chance.choice(helpers), HANG_S)]
        case "short stop":
            return [Fault(step, delay_s, chance.choice(everybody), chance.random() * LEASE_S / 3)]
        case "cut link":
            senders = chance.choice([("a", "b"), ("a",), ("b",)])
            return [Fault(step, delay_s, LINK, chance.random() * LEASE_S / 3, senders)]
        case "reset connections":
            return [Fault(step, delay_s, LINK, n_resets=chance.randint(1, 8))]
        case "refused data" | "refused control":
            duration_s = chance.uniform(LEAST_REFUSED_S, MOST_REFUSED_S)
            return [Fault(step, delay_s, LINK, duration_s, refused=scenario.kind.split()[1])]
        case "lost host":
            return [Fault(step, delay_s, LINK, for_good=True)]
        case "foreign helper":
            return [Fault(step, delay_s, FOREIGNER)]
        case "lost rank":
            return [Fault(step, delay_s, f"rank {chance.randrange(sum(scenario.ranks))}")]
        case "lost node":
            return [Fault(step, delay_s, f"node {chance.randrange(len(scenario.ranks))}")]
        case "lost scheduler":
            lost = Fault(step, delay_s, "scheduler", chance.choice([0.0, 0.3, 1.0]), restarts=True)
            before_s = chance.choice([0.0, 0.002, 0.02])  # while the job recovers, or just before
            return chance.choice([[lost], [Fault(step, delay_s, chance.choice(helpers)),
                                           dataclasses.replace(lost, delay_s=before_s)]])
        case "hung scheduler":
            return [Fault(step, delay_s, "scheduler", HANG_S)]
        case "survived rank":
            return [Fault(step, delay_s, f"rank {chance.randrange(sum(scenario.ranks))}")]
        case "survived node":
            return [Fault(step, delay_s, f"node {chance.randrange(len(scenario.ranks))}")]
        case "survived several":
            return _two_losses(scenario, chance, step, delay_s, helpers)
        case "survived first host":
            seconds = chance.choice([0.0, 0.3, 1.0])
            return [Fault(step, delay_s, "node 0"),
                    Fault(step, chance.choice([0.0, 0.01, 0.3]), "scheduler", seconds, moves=True)]
        case "lost worker, shrink":
            return [Fault(step, delay_s, f"worker {chance.randrange(sum(scenario.ranks))}")]
        case "lost worker, wait" | "rejoining worker":
            return [Fault(step + i * chance.choice([0, 5]), delay_s, f"worker {worker}") for i, worker in
                     enumerate(chance.sample(range(sum(scenario.ranks)), chance.randint(1, sum(scenario.ranks) - 1)))]


def _two_losses(scenario: Scenario, chance: random.Random, step: int, delay_s: float, helpers: list[str]
                ) -> list[Fault]:
    """Return the loss of a rank or a node, and another one at once, while the job recovers, or after that."""
    later_s = chance.choice([0.0, 0.002, 0.01, 0.05, 0.3])
    machine = chance.randrange(len(scenario.ranks))  # which is not lost as a whole
    others = [f"rank {rank}" for i, ranks in enumerate(scenario.machines) for rank in ranks[i == machine:]]
    others += [f"node {i}" for i in range(len(scenario.ranks)) if i != machine]
    one = Fault(step, delay_s, chance.choice(others))
    other = Fault(step, later_s, chance.choice([role for role in [*others, *helpers, "scheduler"] if role != one.role]))
    if other.role == "scheduler":
        other = dataclasses.replace(other, seconds=chance.choice([0.0, 0.3]), restarts=True)
    return chance.choice([[one, other], [dataclasses.replace(other, delay_s=delay_s),
                                         dataclasses.replace(one, delay_s=later_s)]])
