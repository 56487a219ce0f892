"""Formats bpsfast's log, and shows it on standard error unless the program has configured logging itself.

Two formats (the setting ``log_format``). Text: time (local, with its offset), process, job, role, level, message:

    2026-01-31T09:30:00.123+01:00 pid=4711 job=3fa9c1d2 bpsfast node 1 ERROR: PeerLostError: rank 2 ...

JSON: one object a line, with the keys ts, level, logger, pid, role, a number named as the role, job, message, and
exception if there is one. ``job`` is the job's name from the scheduler, of which text shows eight digits.
"""
from __future__ import annotations

import datetime
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable

_handler: logging.Handler | None = None

#: Prefix of a daemon's message that another process ended it, by which a launcher recognizes the message.
ABORTED = "the job was aborted: "
_JSON_START = b'{"ts": '
_HEAD = rb"(\S+ )(pid=\d+ job=\S+ )"
#: Matches a line, in either format, of a process that ends because of another one.
CONSEQUENCE = (rb"(?:(?:" + _HEAD + rb")?bpsfast .*: |\{\"ts\": .*\"message\": \"(?:the job is aborted: )?)"
               rb"(?:PeerLostError|" + ABORTED.encode() + rb")")
_LINE = re.compile(_HEAD + rb"bpsfast (\w+(?: \d+)?) (?=[A-Z]+: )")
_TEXT_JOB_LENGTH = 8


def configure(level: str, who: str = "", form: str = "") -> None:
    """Show messages of the "bpsfast" loggers from *level* on, in *form* ("text" or "json"). May be called again.

    *who*: see `set_identity`. An empty *form* changes nothing. Adds a handler only if neither the root logger nor
    "bpsfast" has one, so a program's own logging is left alone.
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
    """Show in further lines *who* this process is ("node 1", "launcher") and the name of its *job*; "": no change.

    *job* may be a function that returns the name, if it is not known yet or changes. A process of several jobs shows
    the one it has joined last.
    """
    if who:
        _formatter.who = who
    if job:
        _formatter.job = job if callable(job) else lambda: job


def is_json() -> bool:
    """Whether lines are JSON: by `configure`, or, before settings are read, by the environment."""
    return (_formatter.form or os.environ.get("BPSFAST_LOG_FORMAT", "")) == "json"


def time_of(seconds: float) -> str:
    """Return *seconds* since the epoch as local time in ISO 8601, with milliseconds and offset."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def identity(who: str) -> dict[str, str | int]:
    """Return the JSON keys of *who*: "rank 3" is ``{"role": "rank", "rank": 3}``."""
    kind, _, number = who.rpartition(" ")
    return {"role": kind, kind: int(number)} if kind and number.isdecimal() else {"role": who}


def is_json_line(line: bytes) -> bool:
    """Whether *line* is a log line of a bpsfast process that writes JSON."""
    return line.startswith(_JSON_START) and line.endswith(b"}")


def strip_log_prefix(line: bytes, who: bytes, timed: bool) -> bytes:
    """Return a text *line* without the parts that its new prefix repeats: *who*, and the time if *timed*."""
    found = _LINE.match(line)
    if found is None:
        return line
    time, ids, role = found.groups()
    is_said = role == who or who.startswith(role + b" ")  # a node has no number until its job has
    return (b"" if timed else time) + ids + (b"" if is_said else b"bpsfast " + role + b" ") + line[found.end():]


class _Formatter(logging.Formatter):
    """Formats lines as text or JSON. `form`: "" is text."""

    def __init__(self) -> None:
        super().__init__()
        self.form = self.who = ""
        self.job: Callable[[], str] = str

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines, or the one of JSON, for *record*."""
        if self.form == "json":
            found = {"ts": time_of(record.created), "level": record.levelname, "logger": record.name,
                     "pid": record.process, **identity(self.who), "job": self.job(), "message": record.getMessage()}
            if record.exc_info:
                found["exception"] = self.formatException(record.exc_info)
            return json.dumps(found, ensure_ascii=False, default=str)
        who = f"bpsfast {self.who}" if self.who else "bpsfast"
        return (f"{time_of(record.created)} pid={record.process} job={self.job()[:_TEXT_JOB_LENGTH] or '-'} {who} "
                f"{record.levelname}: {super().format(record)}")


_formatter = _Formatter()
_PAUSE_S = 1.0


class RateLimitedLog:
    """Logs to *log* at most one line of each level in a second; the next one has the number of those left out.

    For what strangers cause, such as refused connections. Any thread. *clock* returns monotonic seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._next: dict[int, float] = {}
        self._n_omitted: dict[int, int] = {}

    def note(self, level: int, text: str, *values: object) -> None:
        """Log *text*, formatted with *values*, unless a line of that *level* was logged within the last second."""
        now = self._clock()
        with self._lock:
            if now < self._next.get(level, now):
                self._n_omitted[level] = self._n_omitted.get(level, 0) + 1
                return
            self._next[level] = now + _PAUSE_S
            n_omitted = self._n_omitted.pop(level, 0)
        self._log.log(level, text + (" (and %d more since the last such line)" if n_omitted else ""),
                      *values, *((n_omitted,) if n_omitted else ()))
