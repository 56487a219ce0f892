"""Exit codes of the command line, and errors as one line instead of a traceback."""
from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from .. import logs
from ..orchestration.errors import BpsError, CapacityError, ConfigError, LackingError, StallError

_log = logging.getLogger("bpsfast")

OK = 0
#: A check failed, or whatever has no code of its own.
FAILED = 1
#: Wrong options or settings; as click's own.
USAGE = 2
#: The machine lacks what the command needs: a device, a library, a permission.
ENVIRONMENT = 3
TIMEOUT = 4
WORDS = {
    OK: "all is well",
    FAILED: "a check failed, or the error has no code of its own: the last line says which",
    USAGE: "an option or a setting is wrong: the last line names it",
    ENVIRONMENT: "the machine lacks what the command needs: a device, a library, a permission, memory",
    TIMEOUT: "something did not answer in time",
}


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


def errors_in_words(function: Callable) -> Callable:
    """Print an error as one line; a traceback of our own files would not help who has to fix a setting.

    With ``log_format=json`` it is a log line. With the option ``--json`` (a parameter ``as_json``) standard output gets
    an object ``{"error": ...}`` as well.
    """

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
