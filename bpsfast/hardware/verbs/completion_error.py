"""A bad completion as an exception."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...orchestration.errors import BpsError
from . import completions

#: enum ibv_wr_opcode, and 128 for a receive
_OPERATIONS = {0: "WRITE", 1: "WRITE with immediate", 2: "SEND", 3: "SEND with immediate", 4: "READ", 128: "receive"}


class CompletionError(BpsError, ConnectionError):
    """An operation on a queue pair failed, and the connection with it: open a new one.

    Attributes: `operation` in words, `wr_id`, `slot` (None where it was for none), `device`, `peer`, `nbytes`, `status`
    and `vendor_error` as the device gave them, `meaning` (see `completions.Completion`).
    """

    def __init__(self, status: int, *, operation: str, wr_id: int, device: str, peer: str, nbytes: int = 0,
                 slot: int | None = None, vendor_error: int = 0, where: str = "") -> None:
        self.status, self.vendor_error, self.operation, self.wr_id = status, vendor_error, operation, wr_id
        self.device, self.peer, self.nbytes, self.slot = device, peer, nbytes, slot
        self.meaning = completions.explain(status, vendor_error)
        named = f"wr_id {wr_id}" if slot is None else f"slot {slot}, wr_id {wr_id}"
        super().__init__(f"{operation} of {nbytes} bytes ({named}) from {device} to {peer or 'no peer yet'}{where} "
                         f"failed with {self.meaning}")

    @classmethod
    def of(cls, failure: Mapping[str, Any], slot: int | None = None) -> CompletionError:
        """Return the error for a queue pair's `failure`; *slot* is what the operation was for, if it was for one."""
        opcode = failure["opcode"]
        where = ""
        if opcode in (0, 1, 4):
            where = f" (its address {failure['remote_address']:#x}, rkey {failure['rkey']:#x})"
        return cls(failure["status"], operation=_OPERATIONS.get(opcode, f"operation {opcode}"), wr_id=failure["wr_id"],
                   device=failure["device"], peer=failure["peer"], nbytes=failure["nbytes"], slot=slot,
                   vendor_error=failure["vendor_error"], where=where)


def raise_failure(pair: Any, slot: int | None = None) -> None:
    """Raise what ended the queue pair *pair* (of either provider), if a bad completion of it was polled."""
    if pair.failure is not None:
        raise CompletionError.of(pair.failure, slot)
