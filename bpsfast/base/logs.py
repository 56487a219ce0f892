"""What bpsfast logs, on standard error, unless the program has configured logging itself.

Two formats (the setting ``log_format``). Text: time (local, with its offset), process, job, role, level, message:

    2026-01-31T09:30:00.123+01:00 pid=4711 job=3fa9c1d2 bpsfast node 1 ERROR: PeerLostError: rank 2 ...

JSON: one object a line, with the keys ts, level, logger, pid, role, a number named as the role, job, message, and
exception where there is one. ``job`` is the name that the scheduler gave to the job, of which text shows eight digits.
"""
from __future__ import annotations

import datetime
import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any

_handler: logging.Handler | None = None

#: How a daemon's line begins that tells of an end which others caused: a launcher knows it by that.
ABORTED = "the job was aborted: "
_JSON_START = b'{"ts": '
_HEAD = rb"(\S+ )(pid=\d+ job=\S+ )"
#: Matches a line, of either format, by which a process says that it ends because of another one.
CONSEQUENCE = (rb"(?:(?:" + _HEAD + rb")?bpsfast .*: |\{\"ts\": .*\"message\": \"(?:the job is aborted: )?)"
               rb"(?:PeerLostError|" + ABORTED.encode() + rb")")
_LINE = re.compile(_HEAD + rb"bpsfast (\w+(?: \d+)?) (?=[A-Z]+: )")
_TEXT_JOB_LENGTH = 8


def configure(level: str, who: str = "", form: str = "") -> None:
    """Show messages of the "bpsfast" loggers from *level* on, in *form* ("text" or "json"). May be called again.

    *who*: see `set_identity`. An empty *form* changes nothing. A handler is added only if neither the root logger nor
    ours has one, so a program's own logging stays as it is.
    """
    global _handler
    set_identity(who)
    if form:
        _formatter.form = form
    logger = logging.getLogger("bpsfast")
    logger.setLevel(level)
    if _handler is None and not logger.handlers and not logging.getLogger().handlers:
        _handler = logging.StreamHandler()
        _handler.setFormatter(_formatter)
        logger.addHandler(_handler)
        logger.propagate = False


def set_identity(who: str = "", job: str | Callable[[], str] = "") -> None:
    """Let further lines say *who* this process is ("node 1", "launcher") and the name of its *job*; "": as before.

    *job* may be what returns the name, where that is not known yet ("") or changes. A process of several jobs says the
    one that it has joined last.
    """
    if who:
        _formatter.who = who
    if job:
        _formatter.job = job if callable(job) else lambda: job


def is_json() -> bool:
    """Whether lines are JSON: by `configure`, or else by the environment, which says it before settings are read."""
    return (_formatter.form or os.environ.get("BPSFAST_LOG_FORMAT", "")) == "json"


def time_of(seconds: float) -> str:
    """Return a time (s since the epoch) in ISO 8601, local, with milliseconds and offset."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def identity(who: str) -> dict[str, str | int]:
    """Return what JSON says of *who*: "rank 3" is ``{"role": "rank", "rank": 3}``."""
    kind, _, number = who.rpartition(" ")
    return {"role": kind, kind: int(number)} if kind and number.isdecimal() else {"role": who}


def is_json_line(line: bytes) -> bool:
    """Whether *line* is a log line of a bpsfast process that writes JSON."""
    return line.startswith(_JSON_START) and line.endswith(b"}")


def strip_log_prefix(line: bytes, who: bytes, timed: bool) -> bytes:
    """Return a text *line* as it reads after a head that says *who* wrote it, and when if *timed*."""
    found = _LINE.match(line)
    if found is None:
        return line
    time, ids, role = found.groups()
    is_said = role == who or who.startswith(role + b" ")  # a node has no number until its job has
    return (b"" if timed else time) + ids + (b"" if is_said else b"bpsfast " + role + b" ") + line[found.end():]


class _Formatter(logging.Formatter):
    """Both formats. `form`: "" is text."""

    def __init__(self) -> None:
        super().__init__()
        self.form = self.who = ""
        self.job: Callable[[], str] = str

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, or the one of JSON, for *record*."""
        if self.form == "json":
            return json.dumps(self._object(record), ensure_ascii=False, default=str)
        who = f"bpsfast {self.who}" if self.who else "bpsfast"
        return (f"{time_of(record.created)} pid={record.process} job={self.job()[:_TEXT_JOB_LENGTH] or '-'} {who} "
                f"{record.levelname}: {super().format(record)}")

    def _object(self, record: logging.LogRecord) -> dict[str, Any]:
        found: dict[str, Any] = {"ts": time_of(record.created), "level": record.levelname, "logger": record.name,
                                 "pid": record.process, **identity(self.who), "job": self.job(),
                                 "message": record.getMessage()}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return found


_formatter = _Formatter()
