"""Exit codes: the one table of what each means, for every command, daemon and launcher of the package.

A launcher that starts users' programs ends with the code of one of them, so those can be anything; the codes that it
gives itself are those of the shell, `timeout` and `ssh`.
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

OK = 0
#: A check failed, or whatever has no code of its own.
FAILED = 1
#: Wrong options or settings; as click's own.
USAGE = 2
#: The machine lacks what the command needs: a device, a library, a permission.
ENVIRONMENT = 3
TIMEOUT = 4
#: Of a helper: its job goes on without it.
LEFT_BEHIND = 5
#: Of a daemon: another process of the job failed, and that ended this one.
ABORTED = 6
#: Of a launcher: the job has not ended in time; as timeout(1).
JOB_TIMEOUT = 124
#: Of a launcher: a program cannot be executed, or is not there; as shells.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
#: Of a launcher: a process was lost with its host; as ssh.
LOST_HOST = 255

WORDS = {
    OK: "all is well",
    FAILED: "a check failed, or the error has no code of its own: the last line says which",
    USAGE: "an option or a setting is wrong: the last line names it",
    ENVIRONMENT: "the machine lacks what the command needs: a device, a library, a permission, memory",
    TIMEOUT: "something did not answer in time",
    LEFT_BEHIND: "of a helper: its job has lost or refused it, and goes on without it",
    ABORTED: "of a node or scheduler: another process failed first and ended the job; the last line names it",
}
#: What `bpsfast run` ends with where it is not a process's own code; beside 128 + N, see `words_of`.
WORDS_OF_RUN = {
    JOB_TIMEOUT: "the job has not ended within --timeout",
    NOT_EXECUTABLE: "PROGRAM cannot be executed",
    NOT_FOUND: "PROGRAM was not found",
    LOST_HOST: "the process was lost with its host (-H)",
}


def words_of(code: int) -> str:
    """Return what exit code *code* of a command, daemon or launcher of this package means; "" for none of ours."""
    if code - 128 in signal.valid_signals():
        return f"the process, or the launcher itself, was ended by {signal.Signals(code - 128).name}"
    return WORDS.get(code) or WORDS_OF_RUN.get(code, "")


def code_of_daemon(error: BpsError) -> int:
    """Return the exit code of a daemon that ends with *error*: who lost a peer is not to blame."""
    return ABORTED if isinstance(error, PeerLostError) else code_of(error)


def code_of(error: Exception) -> int:
    """Return the exit code of *error*: by whose fault it is."""
    if isinstance(error, LackingError):
        return ENVIRONMENT
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, StallError | TimeoutError):
        return TIMEOUT
    lacking = isinstance(error, CapacityError) or (isinstance(error, OSError) and not isinstance(error, BpsError))
    return ENVIRONMENT if lacking else FAILED

__all__ = ["ENVIRONMENT", "FAILED", "OK", "TIMEOUT", "USAGE", "WORDS", "WORDS_OF_RUN", "code_of", "exit_on_error",
           "words_of"]

_log = logging.getLogger("bpsfast")


def exit_on_error(function: Callable) -> Callable:
    """Print an error as one line; a traceback of our own files would not help who has to fix a setting.

    With ``log_format=json`` it is a log line. With the option ``--json`` (a parameter ``as_json``) standard output gets
    an object ``{"error": ...}`` as well.
    """

    import click  # ranks import this module, too, and need no command line

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (BpsError, OSError) as exc:
            if isinstance(exc, BrokenPipeError):
                raise  # standard output was closed (`| head`): click ends quietly
            if kwargs.get("as_json"):
                click.echo(json.dumps({"error": {"class": type(exc).__name__, "text": str(exc)}}))
            if logs.is_json():
                logs.configure("ERROR")
                _log.error("%s: %s", type(exc).__name__, exc)
            else:
                click.echo(f"bpsfast: {type(exc).__name__}: {exc}", err=True)
            sys.exit(code_of(exc))

    return wrapped
