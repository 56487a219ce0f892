"""The errors that bpsfast raises on purpose, each class with its remedy, and the errors that decoding may raise."""
from __future__ import annotations

import msgspec

#: What msgspec raises for bytes that are no message. It does not wrap errors of invalid UTF-8 and of deep nesting.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BpsError(Exception):
    """Base of every error that bpsfast raises on purpose."""


class ConfigError(BpsError, ValueError):
    """A setting is missing, unknown or contradicts another. Fix the setting that is named."""


class LackingError(ConfigError):
    """This machine lacks a library, a program or a permission. The text says how to get it."""


class MismatchError(BpsError, ValueError):
    """Two roles disagree (version, setting, shape, dtype). The text names the field and both values."""


class UnsupportedError(BpsError, TypeError):
    """The input has a dtype, layout or device that bpsfast does not sum. Convert it first."""


class ClosedError(BpsError, RuntimeError):
    """The *caller* used something after it was closed, before it was opened, or after a fork. Fix the caller."""


class BusyError(BpsError, RuntimeError):
    """The caller pushed a name again before waiting for its first round, or made a group's call inside another one, as
    in a signal handler. Fix the caller."""


class PeerLostError(BpsError, ConnectionError):
    """A *peer* process disappeared; the text names its role, rank and address. Restart the job."""


class StallError(BpsError, TimeoutError):
    """A wait passed its deadline; the text names who is missing. Look at that process."""


class CapacityError(BpsError, MemoryError):
    """The machine has too little memory for the job; the text gives both numbers."""


class DeviceError(BpsError, RuntimeError):
    """A GPU, its driver or CuPy failed: in a call of bpsfast, or in work of the caller that was enqueued before it."""


class ProtocolError(BpsError, RuntimeError):
    """Bytes disagree with the format: versions are mixed, or bpsfast has a bug. Please report it."""


def error_of(name: str, reason: str) -> BpsError:
    """Return the error of class *name* with *reason*; an unknown name becomes a `PeerLostError`."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, BpsError):
        return kind(reason)
    return PeerLostError(f"{name}: {reason}" if name else reason)
