"""Tie a command to the process that starts it: when that dies, however it dies, the kernel kills the command.

Started by path (see `daemons.tie_to_parent`), imports the standard library only, and replaces itself by the command:

    python die_with_parent.py PARENT_MARK SIGNAL COMMAND [ARGUMENT ...]

What the command starts itself the kernel does not watch: the `guardian` does. The mark (`owner`) and the command's
session are left in its environment, by which that and ``bpsfast clean`` find what outlives the parent.

The kernel watches the *thread* that forked, so the parent must start its children in a thread that stays.
"""
from __future__ import annotations

import ctypes
import os
import sys

#: Holds the parent's mark and the session that the command began in.
VARIABLE = "_BPSFAST_LAUNCHER"
_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells do


def main(arguments: list[str]) -> int:
    """Ask for the signal, make sure the parent still lives, become the command."""
    mark, number, command = arguments[0], int(arguments[1]), arguments[2:]
    parent = int(mark.split(".")[0])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before prctl: no signal will come
        return 128 + number
    os.environ[VARIABLE] = f"{mark}.{os.getsid(0)}"
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print(f"bpsfast: command not found: {command[0]}", file=sys.stderr)
        return _NOT_FOUND
    except OSError as exc:
        print(f"bpsfast: cannot run {command[0]}: {exc.strerror}", file=sys.stderr)
        return _NOT_EXECUTABLE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
