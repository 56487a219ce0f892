"""The workers of an elastic job as its supervisor has them: whom it can do without, and who is started for whom."""
from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from .elastic_service import ElasticService, Order, Replace, Start
from .processes import Command, Process

_MEMBER = "BPSFAST_MEMBER"
_NODE = "BPSFAST_NODE_ID"


def worker(member: int, command: Command, environ: Mapping[str, str]) -> Command:
    """Return *command* as that of worker *member*, with *environ* beside its own variables."""
    return msgspec.structs.replace(command, name=f"worker {member}",
                                   environ={**command.environ, **environ, _MEMBER: str(member)})


def member_of(command: Command) -> int:
    """Return which worker *command* starts."""
    return int(command.environ[_MEMBER])


class WorkerPool:
    """Workers and their muster. Main thread only.

    Parameters
    ----------
    workers
        The commands of those that are started at first.
    goes_on
        Whether the job can do without a worker at all: not if the policy is abort.
    """

    def __init__(self, service: ElasticService, workers: Sequence[Command], goes_on: bool) -> None:
        self._service = service
        self._commands = {member_of(command): command for command in workers}
        self._goes_on = goes_on
        self._running = set(self._commands)
        self._next = len(self._commands)

    def fileno(self) -> int:
        """Return a descriptor that can be read when there are `orders`."""
        return self._service.fileno()

    def orders(self) -> list[Order]:
        """Return what the muster wants to be done."""
        return self._service.orders()

    def commands(self, order: Replace | Start) -> list[Command]:
        """Return what *order* lets start: a lost worker's program on its node, or more workers where fewest are."""
        found = []
        if isinstance(order, Replace):
            found.append(self._another(self._commands[order.member]))
            self._service.started(member_of(found[0]), order.member)
        else:
            for _ in range(order.n_workers):
                found.append(self._another(self._least_used()))
                self._service.started(member_of(found[-1]))
        return found

    def has_ended(self, process: Process) -> bool:
        """Hear that *process* has ended; return whether the job goes on without it.

        It does without one that was killed before the training was over, or whose shell or wrapper says so by exit code
        128 + signal. An error of its own ends the job. Once the training is over nobody asks how a worker ends that had
        no part in the last job.
        """
        member = member_of(process.command)
        self._running.discard(member)
        if process.code == 0 or self.is_superfluous(process):
            self._service.left(member)
        elif _was_killed(process.code) and self._goes_on and not self._service.is_over:
            self._service.ended(member, process.end_in_words())
        else:
            self.give_up(f"{process.command.name} {process.end_in_words()}")
            return False
        return True

    def is_superfluous(self, process: Process) -> bool:
        """Whether the training has ended without *process*: it came too late, or has yet to come."""
        return self._service.is_over and not self._service.has_seat(member_of(process.command))

    def give_up(self, reason: str) -> None:
        """Let those who wait for a next job hear that there is none."""
        self._service.give_up(reason)

    def _another(self, like: Command) -> Command:
        member, self._next = self._next, self._next + 1
        self._commands[member] = worker(member, like, {})
        self._running.add(member)
        return self._commands[member]

    def _least_used(self) -> Command:
        """Return a command of the node with the fewest workers, the first of these."""
        by_node: dict[str, Command] = {}
        for command in self._commands.values():
            by_node.setdefault(command.environ.get(_NODE, ""), command)
        count = Counter(self._commands[member].environ.get(_NODE, "") for member in self._running)
        return by_node[min(by_node, key=lambda node: count[node])]


def _was_killed(code: int | None) -> bool:
    return code is not None and (code < 0 or code - 128 in signal.valid_signals())
