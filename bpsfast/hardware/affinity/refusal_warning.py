"""What the kernel refused of a seating plan: one warning in a process, with what to do about it."""
from __future__ import annotations

import errno
import logging
import os

_log = logging.getLogger("bpsfast.hardware.affinity")
_ADVICE = {
    errno.EPERM: "a container allows it with --cap-add SYS_NICE (docker's seccomp profile refuses it)",
    errno.ENOSYS: "this kernel cannot",
}
_told: list[str] = []


def refused(call: str, code: int, instead: str) -> None:
    """Say that *call* was refused with the errno *code*, and what is done *instead*. Said once; any thread."""
    advice = _ADVICE.get(code, "see which CPUs and memory nodes the cpuset of this process has")
    text = (f"{call} was refused: {errno.errorcode.get(code, code)} ({os.strerror(code)}). {instead}. To have it: "
            f"{advice}; to do without: BPSFAST_NUMA=0")
    if _told:
        _log.debug("%s", text)
    else:
        _told.append(call)
        _log.warning("%s", text)
