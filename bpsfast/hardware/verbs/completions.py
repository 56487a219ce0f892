"""Explains bad RDMA completions (``ibv_wc.status`` and the vendor's code): their names, causes and what to do.

`explain` gives for a status its name, what happened, the usual cause in this library, and what to do next.

References
----------
InfiniBand specification, volume 1, 10.10.3 and 11.6.2; rdma-core, ``libibverbs/verbs.h``: enum ibv_wc_status. The
vendor codes of mlx5 are not documented; these are from public reports.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...orchestration.errors import BpsError

SUCCESS = 0
LOC_PROT_ERR = 4
WR_FLUSH_ERR = 5
REM_ACCESS_ERR = 10
RETRY_EXC_ERR = 12
RNR_RETRY_EXC_ERR = 13


@dataclass(frozen=True)
class Completion:
    """The explanation of one status. `str()` is one sentence for an error message.

    `happened`: what the device reports. `usually`: the most frequent cause. `advice`: what to do next. `vendor`: the
    meaning of the vendor's code, "" if unknown.
    """

    status: int
    name: str
    happened: str
    usually: str
    advice: str
    vendor_error: int = 0
    vendor: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether it only follows from an earlier error, which the first bad completion of the queue pair has."""
        return self.status == WR_FLUSH_ERR

    def __str__(self) -> str:
        code = f", vendor error {self.vendor_error} ({self.vendor_error:#x})" if self.vendor_error else ""
        vendor = f" ({self.vendor})" if self.vendor else ""
        return f"{self.name} ({self.status}{code}): {self.happened}{vendor}; usually {self.usually}. {self.advice}"


_UNUSED = ("a feature that today's devices do not have (reliable datagrams) failed", "a fault of driver or firmware",
           "Update the card's firmware and driver; please report it if it stays.")

#: status -> name, what happened, the usual cause, what to do
_STATUSES: dict[int, tuple[str, str, str, str]] = {
    0: ("SUCCESS", "the operation is done", "nothing to worry about", "Nothing to do."),
    1: ("LOC_LEN_ERR", "a message was longer than the receive request that it met, or than the port allows",
        "two ends which disagree about the size of a slot, or a message above the port's max_msg_sz",
        "Check that both ends run the same version with the same settings; please report it if they do."),
    2: ("LOC_QP_OP_ERR", "the queue pair could not execute the request as it was posted",
        "a request that this device cannot do (operation, number of buffers, inline size)",
        "Please report it with what `bpsfast devices --json` prints."),
    3: ("LOC_EEC_OP_ERR", *_UNUSED),
    4: ("LOC_PROT_ERR", "the device may not touch the local buffer of the request",
        "an lkey that does not cover address and length: memory unregistered, unmapped, or copied by fork after it was "
        "registered; with GPU memory, no peer access of the card to the GPU",
        "If the process forks (data loaders do), see `bpsfast explain RD10`; for GPU memory `bpsfast explain RD12`."),
    5: ("WR_FLUSH_ERR", "the request was thrown out because the queue pair was already in the error state",
        "a consequence: the first bad completion of this queue pair, or the peer's end of it, tells the cause",
        "Look for the first error of this queue pair, here and in the peer's log."),
    6: ("MW_BIND_ERR", "a memory window could not be bound", "a wrong key or missing rights of the region below it",
        "bpsfast binds no memory windows: another library in this process does."),
    7: ("BAD_RESP_ERR", "the peer's answer had an unexpected operation in it",
        "a fault of the peer's driver or firmware, or of two queue pairs that took each other's number",
        "Compare firmware versions of both ends with `bpsfast devices`."),
    8: ("LOC_ACCESS_ERR", "a peer's write with immediate hit a local buffer without the right to be written",
        "a region registered for reading only", "Please report it: the error is on this side."),
    9: ("REM_INV_REQ_ERR", "the peer's device found the request itself wrong",
        "an operation that the peer's queue pair does not allow, more outstanding READs than it takes, or a length "
        "that its receive request cannot hold",
        "Check that both ends run the same version with the same settings."),
    10: ("REM_ACCESS_ERR", "the peer's device refused access to the remote buffer",
         "an rkey, address or length that does not fit a region the peer registered for remote writing; the peer may "
         "have unregistered it",
         "Check that both ends are of the same job and generation; the peer's log has the other half."),
    11: ("REM_OP_ERR", "the peer's device could not finish the operation",
         "a failure in the peer's queue pair or memory; with GPU memory, no peer access of its card to the GPU",
         "Look into the peer's log and its kernel log (dmesg)."),
    12: ("RETRY_EXC_ERR", "the peer did not acknowledge, however often the packet was sent again",
         "a path that does not carry RDMA: the peer's process or port is gone, the wrong GID (RoCE v1 or link-local), "
         "an MTU some switch does not pass, UDP port 4791 filtered, or heavy loss",
         "Type `bpsfast doctor --peer HOST` (checks RD05, RD08, RD09, RD13, RD14) on one end and look whether the "
         "peer's process still runs."),
    13: ("RNR_RETRY_EXC_ERR", "the peer had no receive request posted, however often it was asked",
         "a peer whose process is stopped or has not posted receives for what it promised",
         "See whether the peer's process runs (state T in ps: it was stopped); otherwise please report it."),
    14: ("LOC_RDD_VIOL_ERR", *_UNUSED),
    15: ("REM_INV_RD_REQ_ERR", *_UNUSED),
    16: ("REM_ABORT_ERR", "the peer's side aborted the operation", "a queue pair that the peer closed meanwhile",
         "Look into the peer's log."),
    17: ("INV_EECN_ERR", *_UNUSED),
    18: ("INV_EEC_STATE_ERR", *_UNUSED),
    19: ("FATAL_ERR", "the device itself broke down", "a card that was reset, unplugged or hit a firmware fault",
         "Look into the kernel log: `dmesg | grep -iE 'mlx|infiniband|rdma'`; the job needs another start."),
    20: ("RESP_TIMEOUT_ERR", "the peer's device did not answer in time", "a path or peer as for RETRY_EXC_ERR",
         "Type `bpsfast doctor --peer HOST`."),
    21: ("GENERAL_ERR", "the device reports an error that fits no other status", "a fault of driver or firmware",
         "Look into the kernel log: `dmesg | grep -iE 'mlx|infiniband|rdma'`."),
    22: ("TM_ERR", "tag matching failed", "a request of another library", "bpsfast uses no tag matching."),
    23: ("TM_RNDV_INCOMPLETE", "a tag-matching rendezvous is not complete", "a request of another library",
         "bpsfast uses no tag matching."),
}

#: The texts of ibv_wc_status_str (rdma-core) and ib_wc_status_msg (the kernel) in lower case, without those that logs
#: use for other things as well (fatal error, general error).
_LOG_TEXTS = {
    "local length error": 1, "local qp operation error": 2, "local ee context operation error": 3,
    "local protection error": 4, "work request flushed error": 5, "wr flushed": 5,
    "memory management operation error": 6, "memory bind operation error": 6, "bad response error": 7,
    "local access error": 8, "remote invalid request error": 9, "remote access error": 10,
    "remote operation error": 11, "transport retry count exceeded": 12, "transport retry counter exceeded": 12,
    "rnr retry count exceeded": 13, "rnr retry counter exceeded": 13, "local rdd violation error": 14,
    "remote invalid rd request": 15, "invalid ee context number": 17, "invalid ee context state": 18,
    "response timeout error": 20,
}

#: (status, vendor error) of mlx5 -> its meaning
_MLX5: dict[tuple[int, int], str] = {
    (4, 0x51): "on mlx5 as a sender: mostly GPU memory, or memory that is no longer mapped",
    (4, 0x52): "on mlx5: the local key does not cover the buffer",
    (5, 0xF9): "on mlx5: flushed after an earlier error, no news",
    (9, 0x8A): "on mlx5: the peer's NAK \"invalid request\"",
    (10, 0x88): "on mlx5: the peer's NAK \"remote access error\": key, address, length or permission",
    (11, 0x89): "on mlx5: the peer's NAK \"remote operational error\"",
    (12, 0x81): "on mlx5: the acknowledge timer ran out each time, so nothing came back at all",
}

#: status -> its name without IBV_WC_
NAMES = {status: words[0] for status, words in _STATUSES.items()}
#: vendor error of mlx5 -> the status that reports show with it
BY_VENDOR_ERROR = {vendor: status for status, vendor in _MLX5 if vendor != 0x52}


def explain(status: int, vendor_error: int = 0) -> Completion:
    """Return the explanation of *status*, and of *vendor_error* if it is known with that status. Never raises."""
    if status not in _STATUSES:
        return Completion(status, f"status {status}", "the device reports a status that is not in the specification",
                          "a driver newer than this library, or memory that was overwritten",
                          "Please report it with the driver's version.", vendor_error)
    name, happened, usually, advice = _STATUSES[status]
    return Completion(status, f"IBV_WC_{name}", happened, usually, advice, vendor_error,
                      _MLX5.get((status, vendor_error), ""))


def status_in_log_line(line: str) -> int | None:
    """Return the status that a line of a log names, such as "transport retry counter exceeded"; None if none."""
    found = [(line.lower().find(words), status) for words, status in _LOG_TEXTS.items() if words in line.lower()]
    return min(found)[1] if found else None


def by_name(name: str) -> Completion | None:
    """Return the explanation of a name (IBV_WC_RETRY_EXC_ERR, retry_exc_err, RETRY_EXC), None if it is unknown."""
    wanted = name.strip().upper().replace("-", "_").removeprefix("IBV_WC_")
    for status, known in NAMES.items():
        if wanted in (known, known.removesuffix("_ERR")):
            return explain(status)
    return None


#: enum ibv_wr_opcode, and 128 for a receive
_OPERATIONS = {0: "WRITE", 1: "WRITE with immediate", 2: "SEND", 3: "SEND with immediate", 4: "READ", 128: "receive"}


class CompletionError(BpsError, ConnectionError):
    """An operation on a queue pair failed, and with it the connection: open a new one.

    Attributes: `operation` (its name), `wr_id`, `slot` (None if there was none), `device`, `peer`, `nbytes`, `status`
    and `vendor_error` as reported by the device, `meaning` (a `Completion`).
    """

    def __init__(self, status: int, *, operation: str, wr_id: int, device: str, peer: str, nbytes: int = 0,
                 slot: int | None = None, vendor_error: int = 0, where: str = "") -> None:
        self.status, self.vendor_error, self.operation, self.wr_id = status, vendor_error, operation, wr_id
        self.device, self.peer, self.nbytes, self.slot = device, peer, nbytes, slot
        self.meaning = explain(status, vendor_error)
        named = f"wr_id {wr_id}" if slot is None else f"slot {slot}, wr_id {wr_id}"
        super().__init__(f"{operation} of {nbytes} bytes ({named}) from {device} to {peer or 'no peer yet'}{where} "
                         f"failed with {self.meaning}")

    @classmethod
    def of(cls, failure: Mapping[str, Any], slot: int | None = None) -> CompletionError:
        """Return the error for a queue pair's `failure`; *slot*: the slot of the operation, if any."""
        opcode = failure["opcode"]
        where = ""
        if opcode in (0, 1, 4):
            where = f" (its address {failure['remote_address']:#x}, rkey {failure['rkey']:#x})"
        return cls(failure["status"], operation=_OPERATIONS.get(opcode, f"operation {opcode}"), wr_id=failure["wr_id"],
                   device=failure["device"], peer=failure["peer"], nbytes=failure["nbytes"], slot=slot,
                   vendor_error=failure["vendor_error"], where=where)


def raise_failure(pair: Any, slot: int | None = None) -> None:
    """Raise `CompletionError` if a bad completion of *pair* (of either provider) was polled."""
    if pair.failure is not None:
        raise CompletionError.of(pair.failure, slot)
