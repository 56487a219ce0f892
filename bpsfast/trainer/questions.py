"""Questions to the node or, through it, to the scheduler: numbered, because several threads may ask at once."""
from __future__ import annotations

import itertools
from collections.abc import Callable

from ..orchestration.errors import StallError
from ..orchestration.messages import Message
from .mailbox import Mailbox


class Questions:
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
        self._answers: dict[int, Message] = {}

    def receive(self, number: int, answer: Message) -> None:
        """Enter the answer to question *number*. Called by the mailbox, one message at a time."""
        self._answers[number] = answer

    def ask(self, question: Callable[[int], Message], trouble: str, timeout_s: float = 0.0,
            given_up: Callable[[], Message | None] = lambda: None) -> Message:
        """Return the answer to ``question(number)``.

        Parameters
        ----------
        trouble
            What has happened if there is none, for the error.
        timeout_s
            0: what the session's setting says.
        given_up
            Asked now and then; what it returns, unless None, counts as the answer.

        Raises
        ------
        StallError
            If no answer came in time.
        """
        timeout_s = timeout_s or self._timeout_s
        self._require_open()
        number = next(self._numbers)
        self._mailbox().send(question(number))
        answer = self._mailbox().wait(lambda: self._answers.pop(number, None) or given_up(), timeout_s)
        if answer is None:
            raise StallError(f"{trouble} within {timeout_s:g} s")
        return answer
