"""Describes why an RDMA stream failed: the operation, partition and peer, the device's error, and its usual cause."""
from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....hardware.verbs import completions
from ....orchestration.errors import UnsupportedError


class NoRdmaError(UnsupportedError):
    """RDMA with a peer is impossible; the text is the reason. With transport=auto the pair uses tcp."""


class NoDeviceError(NoRdmaError):
    """This machine has no RDMA device, or is told to use none; needs no warning."""


#: ibv_event_type -> what happened to the queue pair, queue or device
_EVENTS = {
    0: "the completion queue broke (CQ_ERR): it overran, or the card failed",
    1: "the queue pair broke (QP_FATAL): the card or its driver failed",
    2: "the queue pair refused what the peer sent (QP_REQ_ERR): two versions, or a bug of bpsfast",
    3: "the peer wrote where it may not (QP_ACCESS_ERR): a wrong key, address or length",
    8: "the device is gone (DEVICE_FATAL): reset, unplugged or its driver was removed; see the kernel's log (dmesg)",
}
#: How long a write may be retried: 0.54 s and six retries, for which devices may take four times as long (InfiniBand
#: specification, volume 1, 9.7.6.1.3).
_RETRIES_NS = 16_000_000_000


class PortNow(NamedTuple):
    """The present state of a rail's port; whether it still has the LID and the GID that peers know.

    `error_ns`: when it last went down, in monotonic ns, 0: never.
    """

    state: str = "ACTIVE"
    has_lid: bool = True
    has_gid: bool = True
    error_ns: int = 0

    def explains(self, failure: Mapping[str, Any]) -> str:
        """Return how the port may have caused *failure*, as text; "" if it did not.

        A port that is up again explains nothing that began later: no stream that was tested since, and no write that
        was posted since.
        """
        silent_ns = 1_000_000_000 * failure["code"] if failure["kind"] == "silence" else 0
        if self.error_ns and self.error_ns >= max(failure["proven_ns"], failure["at_ns"] - _RETRIES_NS - silent_ns):
            return "; this machine's port went down before that (PORT_ERR)"
        if self.state != "ACTIVE":  # the event may come after the completions that it causes
            return f"; this machine's port is {self.state} now"
        if not self.has_lid:
            return "; this machine's port has another LID now"
        if not self.has_gid:
            return "; the GID is gone from this machine's port: an address or an interface went"
        return ""


def is_consequence(failure: Mapping[str, Any]) -> bool:
    """Return whether *failure* is only a flush, the consequence of an earlier one."""
    return failure["kind"] == "completion" and completions.explain(failure["code"]).is_consequence


def describe(failure: Mapping[str, Any] | None, who: str, rail: str, port: PortNow) -> str:
    """Return a sentence about *failure* of the stream to *who* over *rail*'s *port*; None: the connection was closed.

    *failure* is that of `bpsfast.pyx.rdma.Stream.failure`.
    """
    if failure is None:
        return "closed"
    kind, code, slot = failure["kind"], failure["code"], failure["slot"]
    nbytes, round_ = failure["nbytes"], failure["round"]
    of = "" if slot is None else f" of partition {slot} (round {round_}, {nbytes} bytes)"
    after = port.explains(failure)
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
    if kind == "silence":
        return (f"RDMA WRITE{of} to {who} over {rail} had no answer for {code} s{after}: the peer posts no receive "
                "requests because its process is stopped or hangs, the driver lost the write (see dmesg), or the "
                "device has no limit of its own")
    return (f"the completions of {rail} can no longer be read ({os.strerror(code)}): the card or its driver failed"
            f"{after}")
