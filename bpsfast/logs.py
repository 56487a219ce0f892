"""Where bpsfast's log goes: standard error, unless the program has configured logging itself."""
from __future__ import annotations

import logging

_FORMAT = "bpsfast {who}%(levelname)s: %(message)s"
_handler: logging.Handler | None = None

#: How a daemon's line begins that tells of an end which others caused: a launcher knows it by that.
ABORTED = "the job was aborted: "


def configure(level: str, who: str = "") -> None:
    """Show messages of the "bpsfast" loggers from *level* on, headed by *who* ("node 1"). May be called again.

    Adds a handler only if neither the root logger nor ours has one: a program's own logging is left alone.
    """
    global _handler
    logger = logging.getLogger("bpsfast")
    logger.setLevel(level)
    if _handler is None and not logger.handlers and not logging.getLogger().handlers:
        _handler = logging.StreamHandler()
        logger.addHandler(_handler)
        logger.propagate = False
    if _handler is not None and (who or _handler.formatter is None):
        _handler.setFormatter(logging.Formatter(_FORMAT.format(who=f"{who} " if who else "")))
