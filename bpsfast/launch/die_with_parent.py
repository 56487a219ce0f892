"""Run a command that the kernel kills when the process that starts it dies, in whatever way.

Started by path (see `daemons.tie_to_parent`), imports the standard library only, and replaces itself by the command:

    python die_with_parent.py PARENT_MARK SIGNAL COMMAND [ARGUMENT ...]

The kernel does not watch what the command starts itself; the `orphan_reaper` does. It and ``bpsfast clean`` find what
outlives the parent by a variable in the environment, which has the parent's mark and the command's session.

The kernel watches the *thread* that forked, so the parent must start its children in a thread that stays.
"""
from __future__ import annotations

import ctypes
import os
import sys

#: As `base.process_identity.LAUNCHER_VARIABLE`.
VARIABLE = "_BPSFAST_LAUNCHER"
_PR_SET_PDEATHSIG = 1
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells do


def main(arguments: list[str]) -> int:
    """Ask for the signal, make sure that the parent still lives, become the command."""
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
