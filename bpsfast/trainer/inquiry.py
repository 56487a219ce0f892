"""Who keeps a wait waiting: asked of the job when time is up, and before that when somebody has left."""
from __future__ import annotations

import itertools
from collections.abc import Callable

from ..orchestration.messages import Departed, StallAnswer, Stalled
from .mailbox import Mailbox

#: Once somebody has left, how often a wait asks whether it is in vain.
DOUBT_S = 0.5
#: How long to wait for the answer to "who is missing?".
_ANSWER_S = 2.5
#: The partition of a question about a declaration or a barrier.
_NO_PART = -1


class Inquiry:
    """Asks on behalf of *rank*. Any thread.

    Parameters
    ----------
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    mailbox
        Returns the way to the node; it delivers what `receive` takes.
    """

    def __init__(self, rank: int, require_open: Callable[[], None], mailbox: Callable[[], Mailbox]) -> None:
        self._rank = rank
        self._require_open = require_open
        self._mailbox = mailbox
        self._numbers = itertools.count(1)
        self._answers: dict[int, StallAnswer | None] = {}  # by question, None: not answered yet
        self._departed = False

    def receive(self, message: StallAnswer | Departed) -> None:
        """Enter what the node says. Called by the mailbox, one message at a time."""
        if isinstance(message, Departed):
            self._departed = True
        elif message.question in self._answers:  # else it comes too late, and nobody waits for it any more
            self._answers[message.question] = message

    def somebody_left(self) -> bool:
        """Return whether a rank has left, as far as the node's messages say: only then can a wait be hopeless."""
        if not self._departed:
            self._require_open()  # before any lock: a forked child may have inherited it locked
            self._mailbox().pump()
        return self._departed

    def ask(self, part: int, round: int, name: str) -> StallAnswer:
        """Ask who has not arrived for *round* of *part* of tensor *name*, and whether waiting on is in vain."""
        mailbox, number = self._mailbox(), next(self._numbers)
        self._answers[number] = None
        try:
            mailbox.send(Stalled(rank=self._rank, question=number, part=part, round=round, name=name))
            answer = mailbox.wait(lambda: self._answers[number], _ANSWER_S)
        finally:
            del self._answers[number]
        if answer is None:
            return StallAnswer(rank=self._rank, question=number, stage="unknown", missing=(
                f"no answer to who is missing, from node or scheduler, within {_ANSWER_S:g} s"))
        return answer

    def ask_about(self, name: str) -> StallAnswer:
        """Ask who has not declared tensor *name*, or entered ``barrier:<n>``. Returns as `ask`."""
        return self.ask(_NO_PART, 0, name)
