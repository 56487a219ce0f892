"""What ended a lane, in words: which operation on which partition to whom, what the device said, what it usually means.
"""
from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

from ...orchestration.errors import UnsupportedError
from ...verbs import completions


class NoRdmaError(UnsupportedError):
    """RDMA with a peer cannot be; the text is the reason. With transport=auto the pair takes tcp."""


class NoDeviceError(NoRdmaError):
    """This machine has no RDMA device, or is to use none: nothing that anybody needs to be warned of."""


#: ibv_event_type -> what happened to the queue pair, queue or device
_EVENTS = {
    0: "the completion queue broke (CQ_ERR): it overran, or the card failed",
    1: "the queue pair broke (QP_FATAL): the card or its driver failed",
    2: "the queue pair refused what the peer sent (QP_REQ_ERR): two versions, or our bug",
    3: "the peer wrote where it may not (QP_ACCESS_ERR): a wrong key, address or length",
    8: "the device is gone (DEVICE_FATAL): reset, unplugged or its driver was removed; see the kernel's log (dmesg)",
}
#: The last event of a port, where it explains writes that nobody acknowledged.
_PORT_EVENTS = {
    10: "this machine's port went down before that (PORT_ERR)",
    11: "the port's LID changed before that",
    18: "the port's GID table changed before that: an address or an interface went",
}


def describe(failure: Mapping[str, Any] | None, who: str, rail: str, event: int = -1, state: str = "ACTIVE") -> str:
    """Return one sentence about *failure* (`bpsfast.pyx.rdma.Lane.failure`) of the lane to *who* over the port *rail*.

    *event*: the rail's last asynchronous event, -1 for none; *state*: the port's, as it is now (the event that tells of
    a change may come after the completions that it causes). No failure: the connection was closed.
    """
    if failure is None:
        return "closed"
    kind, code, slot = failure["kind"], failure["code"], failure["slot"]
    nbytes, round_ = failure["nbytes"], failure["round"]
    of = "" if slot is None else f" of partition {slot} (round {round_}, {nbytes} bytes)"
    after = f"; {_PORT_EVENTS[event]}" if event in _PORT_EVENTS else ""
    if not after and state != "ACTIVE":
        after = f"; this machine's port is {state} now"
    if kind == "completion":
        operation = "a receive request for its writes" if failure["is_receive"] else f"RDMA WRITE{of}"
        return f"{operation} to {who} over {rail} failed: {completions.explain(code, failure['vendor_error'])}{after}"
    if kind == "arrival":
        return (f"a write of {nbytes} bytes for slot {slot}, round {round_} mod 16, epoch {code} mod 256 came from "
                f"{who} over {rail} and fits nothing that is waited for there")
    if kind == "post":
        what = "ibv_post_recv" if failure["is_receive"] else f"ibv_post_send of an RDMA WRITE{of}"
        return f"{what} to {who} over {rail} was refused: {errno.errorcode.get(code, code)}: {os.strerror(code)}{after}"
    if kind == "event":
        return f"{_EVENTS.get(code, f'event {code} of the device')} on {rail}, with {who}"
    return f"the completions of {rail} can no longer be read ({os.strerror(code)}): the card or its driver failed"
