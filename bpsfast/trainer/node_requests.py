"""Questions to the node or, through it, to the scheduler: numbered, because several threads may ask at once."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..orchestration.errors import StallError
from ..orchestration.messages import Message
from .mailbox import Mailbox


class NodeRequests:
    """Asks, and knows what was answered. Any thread.

    Parameters
    ----------
    timeout_s
        How long an answer may take unless a question says otherwise.
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    mailbox
        Returns the way to the node; it delivers what `receive` takes.
    """

    def __init__(self, timeout_s: float, require_open: Callable[[], None], mailbox: Callable[[], Mailbox]) -> None:
        self._timeout_s = timeout_s
        self._require_open = require_open
        self._mailbox = mailbox
        self._numbers = itertools.count(1)
        self._answers: dict[int, list[Message]] = {}  # of the questions that somebody still waits for

    def receive(self, number: int, answer: Message) -> None:
        """Enter the answer to question *number*, if it is still wanted. Called by the mailbox, one at a time."""
        answers = self._answers.get(number)
        if answers is not None:
            answers.append(answer)

    def ask(self, question: Callable[[int], Message], trouble: str, timeout_s: float = 0.0,
            given_up: Callable[[], Message | None] = lambda: None, fds: Sequence[int] = ()) -> Message:
        """Return the answer to ``question(number)``.

        Parameters
        ----------
        trouble
            What has happened if there is none, for the error.
        timeout_s
            0: what the session's setting says.
        given_up
            Asked now and then; what it returns, unless None, counts as the answer.
        fds
            Descriptors that go with the question; they stay the caller's.

        Raises
        ------
        StallError
            If no answer came in time.
        """
        timeout_s = timeout_s or self._timeout_s
        self._require_open()
        number = next(self._numbers)
        answers = self._answers[number] = []
        try:
            self._mailbox().send(question(number), fds)
            answer = self._mailbox().wait(lambda: answers[0] if answers else given_up(), timeout_s)
        finally:
            del self._answers[number]
        if answer is None:
            raise StallError(f"{trouble} within {timeout_s:g} s")
        return answer
