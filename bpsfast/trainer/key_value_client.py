"""The job's key-value store: short values that a rank publishes and others look up. The scheduler keeps them."""
from __future__ import annotations

from collections.abc import Callable

from ..orchestration.errors import error_of
from ..orchestration.job import key_value_store
from ..orchestration.messages import KeyValueReply, Lookup, Message, Publish, Withdraw
from .node_connection import NodeRequests

#: How much longer than the scheduler a rank waits for the reply to a look-up.
_FINDING_S = 5.0
_GIVEN_UP = KeyValueReply(rank=-1, question=0, error="ClosedError", reason="the look-up was cancelled")


class KeyValueClient:
    """The job's key-value store, for *rank*. Any thread."""

    def __init__(self, rank: int, requests: NodeRequests) -> None:
        self._rank = rank
        self._requests = requests

    def publish(self, key: str, value: bytes) -> None:
        """Store *value* under *key* for all ranks, replacing this rank's earlier value.

        Once this returns, every `lookup` finds it. It stays until it is withdrawn, also after this rank has left.
        Raises `ConfigError` or `CapacityError` if the key is empty or too long, or the value or the sum of this rank's
        values is too large. Raises `MismatchError` if another rank has published under this key.
        """
        key_value_store.check(key, value)
        self._find(lambda question: Publish(rank=self._rank, question=question, key=key, value=value),
                   f"did not accept the value of {key!r}", 0.0)

    def withdraw(self, prefix: str) -> None:
        """Remove this rank's values whose keys begin with *prefix*. Does not wait."""
        self._requests.mailbox.send(Withdraw(rank=self._rank, prefix=prefix))

    def lookup(self, key: str, timeout_s: float, who: str, given_up: Callable[[], bool] = lambda: False) -> bytes:
        """Return the value of *key*, waiting until a rank has published it.

        *who*: who publishes it, for errors. If it is "rank 3", the wait ends once that rank has left the job.
        *given_up* is called now and then, and returns whether to cancel the look-up. Raises `StallError` if it was not
        published within *timeout_s* seconds, or *who* has left without it. Raises `ClosedError` if it was cancelled
        (*given_up*).
        """
        key_value_store.check(key)
        found = self._find(lambda question: Lookup(rank=self._rank, question=question, key=key, timeout_s=timeout_s,
                                                   who=who), f"did not say whether {who} published {key!r}", timeout_s,
                           given_up)
        return found.value

    def _find(self, question: Callable[[int], Message], trouble: str, timeout_s: float,
              given_up: Callable[[], bool] = lambda: False) -> KeyValueReply:
        found = self._requests.ask(KeyValueReply, question, f"node or scheduler {trouble}", timeout_s + _FINDING_S,
                                   lambda: _GIVEN_UP if given_up() else None)
        if found.error:
            raise error_of(found.error, found.reason)
        return found
