"""Who keeps a wait waiting: asked of the job when time is up, and before that when somebody has left."""
from __future__ import annotations

from collections.abc import Callable

from ..orchestration.errors import StallError
from ..orchestration.messages import StallAnswer, StallQuestion
from .mailbox import Mailbox
from .node_requests import NodeRequests

#: Once somebody has left, how often a wait asks whether it is in vain.
DOUBT_S = 0.5
#: How long to wait for the answer to "who is missing?".
_ANSWER_S = 2.5
#: The partition of a question about a declaration or a barrier.
_NO_PART = -1


class StallQuery:
    """Asks on behalf of *rank*. Any thread.

    Parameters
    ----------
    questions
        Asks the node, and through it the scheduler.
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    mailbox
        Returns the way to the node; what it delivers includes that somebody has departed.
    """

    def __init__(self, rank: int, questions: NodeRequests, require_open: Callable[[], None],
                 mailbox: Callable[[], Mailbox]) -> None:
        self._rank = rank
        self._questions = questions
        self._require_open = require_open
        self._mailbox = mailbox
        self._departed = False

    def departed(self) -> None:
        """Note that somebody has left. Called by the mailbox, one message at a time."""
        self._departed = True

    def has_departures(self) -> bool:
        """Return whether a rank has left, as far as the node's messages say: only then can a wait be hopeless."""
        if not self._departed:
            self._require_open()  # before any lock: a forked child may have inherited it locked
            self._mailbox().pump()
        return self._departed

    def ask(self, part: int, round: int, name: str) -> StallAnswer:
        """Ask who has not arrived for *round* of *part* of tensor *name*, and whether waiting on is in vain."""
        try:
            answer = self._questions.ask(
                lambda question: StallQuestion(rank=self._rank, question=question, part=part, round=round, name=name),
                "no answer to who is missing, from node or scheduler,", _ANSWER_S)
        except StallError as exc:  # to wait is the caller's to end, with what it knows
            return StallAnswer(rank=self._rank, question=0, stage="unknown", missing=str(exc))
        assert isinstance(answer, StallAnswer)
        return answer

    def ask_about(self, name: str) -> StallAnswer:
        """Ask who has not declared tensor *name*, or entered ``barrier:<n>``. Returns as `ask`."""
        return self.ask(_NO_PART, 0, name)
