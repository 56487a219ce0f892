"""Runs a program on a new terminal of a given size."""
from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence


def on_terminal(arguments: Sequence[str], width: int, height: int = 24, typed: bytes = b"",
                timeout_s: float = 60.0) -> tuple[int, str]:
    """Run ``bpsfast *arguments*`` with *typed* as input; return its exit code and its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    try:
        with subprocess.Popen([sys.executable, "-m", "bpsfast", *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
                              env={**environ, "TERM": "xterm-256color"}, start_new_session=True) as process:
            os.close(theirs)
            os.write(ours, typed)
            written = b""
            while True:
                try:
                    data = os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
                if not data:
                    break
                written += data
            return process.wait(timeout_s), written.decode()
    finally:
        os.close(ours)
