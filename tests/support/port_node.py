"""A simulated node for a rank's port, and events that interrupt a wait: signals, the node's death."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from bpsfast.pyx import ring
from bpsfast.pyx.port import Port

BOARD_WORDS = 4096  # offset of the words, 64 bytes apart


class Node:
    """The words that a node shares with a rank: a board of 16 partitions, a lane of four entries, a doorbell."""

    def __init__(self):
        self.board = bytearray(4096 + 64 * 16)
        self.lane_memory, self.bell = bytearray(256 + 32 * 4), bytearray(ring.DOORBELL_NBYTES)
        ring.format_board(self.board)
        ring.format_lane(self.lane_memory)
        ring.format_doorbell(self.bell)
        self.lane = ring.Lane(self.lane_memory)

    def publish(self, part, round):
        self.board[BOARD_WORDS + 64 * part : BOARD_WORDS + 64 * part + 4] = round.to_bytes(4, "little")

    @property
    def rings(self):
        """Return how often the doorbell rang."""
        return int.from_bytes(self.bell[64:68], "little")

    def abort(self, reason):
        self.board[64 : 64 + len(reason)] = reason
        self.board[4:8] = (1).to_bytes(4, "little")

    def port(self, pidfd=-1, **options):
        return Port(self.lane_memory, self.board, self.bell, pidfd, **options)


@contextlib.contextmanager
def mortal():
    """Yield a process that stands for the node and may be killed, and its pidfd; it has ended afterwards."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        yield process, pidfd
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        os.close(pidfd)


@contextlib.contextmanager
def alarms(handle, after_s, every_s=0.0):
    """Call *handle* by SIGALRM after *after_s* seconds, and then every *every_s* (0: only once)."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: handle())
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt():
    """Raise an exception, as a signal handler may."""
    raise InterruptedError("handled")
