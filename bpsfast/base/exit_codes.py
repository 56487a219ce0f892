"""The exit codes of all commands, daemons and launchers, and what they mean.

A launcher of user programs ends with the code of one of them; its own codes are those of shells, timeout(1) and ssh.
"""
from __future__ import annotations

import functools
import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

from ..orchestration.errors import BpsError, CapacityError, ConfigError, LackingError, PeerLostError, StallError
from . import logs

_log = logging.getLogger("bpsfast")

#: `WORDS` has the meanings; 2 is click's code, too.
OK, FAILED, USAGE, ENVIRONMENT, TIMEOUT, LEFT_BEHIND, ABORTED = range(7)
#: Of `bpsfast run` (`WORDS_OF_RUN`), as of timeout(1), shells, and ssh.
JOB_TIMEOUT, NOT_EXECUTABLE, NOT_FOUND, LOST_HOST = 124, 126, 127, 255

WORDS = {
    OK: "all is well",
    FAILED: "a check failed, or the error has no code of its own; the last line names it",
    USAGE: "an option or a setting is invalid; the last line names it",
    ENVIRONMENT: "the machine lacks what the command needs: a device, a library, a permission, memory",
    TIMEOUT: "something did not answer in time",
    LEFT_BEHIND: "helper or scheduler: its job lost or refused it, and goes on without it",
    ABORTED: "node or scheduler: another process failed first and ended the job; the last line names it",
}
#: Further exit codes of `bpsfast run`, besides those of processes and 128 + N; see `words_of`.
WORDS_OF_RUN = {
    JOB_TIMEOUT: "the job did not end within --timeout",
    NOT_EXECUTABLE: "PROGRAM cannot be executed",
    NOT_FOUND: "PROGRAM was not found",
    LOST_HOST: "the process was lost with its host (-H)",
}


def words_of(code: int) -> str:
    """Return the meaning of exit code *code*, "" if it is not one of ours."""
    if code - 128 in signal.valid_signals():
        return f"the process, or the launcher itself, was ended by {signal.Signals(code - 128).name}"
    return WORDS.get(code) or WORDS_OF_RUN.get(code, "")


def code_of_daemon(error: BpsError) -> int:
    """Return the exit code of a daemon that ends with *error*; a lost peer is not its own fault."""
    return ABORTED if isinstance(error, PeerLostError) else code_of(error)


def code_of(error: Exception) -> int:
    """Return the exit code of *error* by its cause."""
    if isinstance(error, LackingError):
        return ENVIRONMENT
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, StallError | TimeoutError):
        return TIMEOUT
    is_lack = isinstance(error, CapacityError) or (isinstance(error, OSError) and not isinstance(error, BpsError))
    return ENVIRONMENT if is_lack else FAILED



def exit_on_error(function: Callable) -> Callable:
    """Print an error of a command as one line without a traceback, and exit with its code.

    With ``log_format=json`` the line is a log record. With the option ``--json`` (parameter *as_json*, or *form* of
    `output.options`) standard output gets ``{"error": ...}`` as well.
    """
    import click  # ranks import this module, too, and need no command line

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (BpsError, OSError) as exc:
            if isinstance(exc, BrokenPipeError):
                raise  # standard output was closed (`| head`): click exits quietly
            if kwargs.get("as_json") or getattr(kwargs.get("form"), "as_json", False):
                click.echo(json.dumps({"error": {"class": type(exc).__name__, "text": str(exc)}}))
            if logs.is_json():
                logs.configure("ERROR")
                _log.error("%s: %s", type(exc).__name__, exc)
            else:
                click.echo(f"bpsfast: {type(exc).__name__}: {exc}", err=True)
            sys.exit(code_of(exc))

    return wrapped
