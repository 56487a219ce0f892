"""Notices: short values under keys, which a rank leaves with the scheduler for whoever looks them up."""
from __future__ import annotations

from collections.abc import Callable

from ..orchestration.job import key_value_store
from ..orchestration.messages import KeyValueReply, Lookup, Message, Publish, Withdraw
from .node_connection import Mailbox, NodeRequests, error_of

#: How much longer than the scheduler a rank waits for its word on a notice.
_FINDING_S = 5.0
_GIVEN_UP = KeyValueReply(rank=-1, question=0, error="ClosedError", reason="nobody waits for the notice any more")


class KeyValueClient:
    """The job's notices, as *rank* sees them. Any thread.

    Parameters
    ----------
    questions
        Asks the scheduler.
    require_open
        Raises `ClosedError` when the session is closed, or is another process's.
    mailbox
        The way to the node.
    """

    def __init__(self, rank: int, questions: NodeRequests, require_open: Callable[[], None],
                 mailbox: Mailbox) -> None:
        self._rank = rank
        self._questions = questions
        self._require_open = require_open
        self._mailbox = mailbox

    def publish(self, key: str, value: bytes) -> None:
        """Leave a notice for all ranks to find, instead of one of the same *key* that this rank has left before.

        Once this returns, every `lookup` finds it. It stays until it is withdrawn, also after this rank has left.

        Raises
        ------
        ConfigError, CapacityError
            If the key is empty or too long; if the value, or all that this rank has published, is too much.
        MismatchError
            If another rank has published under this key.
        """
        key_value_store.check(key, value)
        self._find(lambda question: Publish(rank=self._rank, question=question, key=key, value=value),
                   f"did not take notice {key!r}", 0.0)

    def withdraw(self, prefix: str) -> None:
        """Take back this rank's notices whose keys begin with *prefix*. Not waited for."""
        self._require_open()
        self._mailbox.send(Withdraw(rank=self._rank, prefix=prefix))

    def lookup(self, key: str, timeout_s: float, who: str, given_up: Callable[[], bool] = lambda: False) -> bytes:
        """Return the value of notice *key*, as soon as somebody has published it.

        Parameters
        ----------
        who
            Whose notice it is, for errors. Called "rank 3", it is not waited for once that rank has left the job.
        given_up
            Asked now and then whether this still matters to anybody.

        Raises
        ------
        StallError
            If it was not published within *timeout_s* seconds, or *who* has left without it.
        ClosedError
            If it was *given_up*.
        """
        key_value_store.check(key)
        found = self._find(lambda question: Lookup(rank=self._rank, question=question, key=key, timeout_s=timeout_s,
                                                   who=who), f"did not say whether {who} published {key!r}", timeout_s,
                           given_up)
        return found.value

    def _find(self, question: Callable[[int], Message], trouble: str, timeout_s: float,
              given_up: Callable[[], bool] = lambda: False) -> KeyValueReply:
        found = self._questions.ask(question, f"node or scheduler {trouble}", timeout_s + _FINDING_S,
                                    lambda: _GIVEN_UP if given_up() else None)
        assert isinstance(found, KeyValueReply)
        if found.error:
            raise error_of(found.error, found.reason)
        return found
