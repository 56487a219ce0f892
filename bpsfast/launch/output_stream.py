"""A stream that a launcher writes: whoever reads it may stop (a pager, a terminal), and must not stop the launcher."""
from __future__ import annotations

import os
import select
import stat
from typing import BinaryIO

#: A pipe that can be written takes so much at once (POSIX), in blocking mode too.
_AT_ONCE_NBYTES = select.PIPE_BUF


class OutputStream:
    """What is written to *target*, in order. Owner thread only.

    What a pipe, a terminal or a socket does not take now stays here until `flush`. *target* is not made non-blocking:
    the mode belongs to all programs that share it. Files take everything at once.

    `fd`: to be watched while `pending_nbytes` is not 0, None for a file. `is_terminal`: of *target*.
    """

    def __init__(self, target: BinaryIO) -> None:
        self.is_terminal = target.isatty()
        self._target = target
        self.fd = target.fileno() if _may_stall(target) else None
        self._leaves = bytearray()

    @property
    def pending_nbytes(self) -> int:
        """Bytes that wait for the reader."""
        return len(self._leaves)

    def write(self, data: bytes) -> None:
        """Append *data* to what leaves, and let the target take what it takes. Raises as `flush`."""
        if self.fd is None:
            self._target.write(data)
            self._target.flush()
            return
        self._leaves += data
        self.flush()

    def flush(self) -> None:
        """Write what the target takes now.

        Raises
        ------
        BrokenPipeError, OSError
            Nobody reads any more, or another fault of the target; what waits is dropped.
        """
        while self._leaves and self._can_be_written(0.0):
            assert self.fd is not None, "a file leaves nothing"
            try:
                n_written = os.write(self.fd, self._leaves[:_AT_ONCE_NBYTES])
            except BlockingIOError:  # another program has made it non-blocking
                return
            except OSError:
                self._leaves.clear()
                raise
            del self._leaves[:n_written]

    def wait(self) -> None:
        """Wait until all is written. Raises as `flush`."""
        while self._leaves:
            self._can_be_written(None)
            self.flush()

    def drop(self) -> int:
        """Forget what waits; return how many bytes that were."""
        nbytes = len(self._leaves)
        self._leaves.clear()
        return nbytes

    def _can_be_written(self, timeout_s: float | None) -> bool:
        assert self.fd is not None, "a file leaves nothing"
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def is_one(out: BinaryIO, err: BinaryIO) -> bool:
    """Tell whether both are the same pipe, terminal or socket (``2>&1``)."""
    return _may_stall(out) and _may_stall(err) and os.path.sameopenfile(out.fileno(), err.fileno())


def _may_stall(target: BinaryIO) -> bool:
    try:
        mode = os.fstat(target.fileno()).st_mode
    except OSError:  # it is memory
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or target.isatty()
