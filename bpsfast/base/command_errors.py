"""Errors of commands as one line instead of a traceback, with the exit code of their kind (`exit_codes`)."""
from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import click

from ..orchestration.errors import BpsError
from . import logs
from .exit_codes import ENVIRONMENT, FAILED, OK, TIMEOUT, USAGE, WORDS, WORDS_OF_RUN, code_of, words_of

__all__ = ["ENVIRONMENT", "FAILED", "OK", "TIMEOUT", "USAGE", "WORDS", "WORDS_OF_RUN", "code_of", "exit_on_error",
           "words_of"]

_log = logging.getLogger("bpsfast")


def exit_on_error(function: Callable) -> Callable:
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
