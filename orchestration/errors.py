"""What bpsfast raises on purpose, classed by whose fault it is and what to do next."""
from __future__ import annotations

import msgspec

#: Strings need not be UTF-8, and nesting has no end: these two it does not turn into errors of its own.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class BpsError(Exception):
    """Root of every error that bpsfast raises on purpose."""


class ConfigError(BpsError, ValueError):
    """A setting is missing, unknown or contradicts another. Fix the setting that is named."""


class LackingError(ConfigError):
    """This machine lacks a library, a program or a permission that is asked for. The text says how to get it."""


class MismatchError(BpsError, ValueError):
    """Two roles disagree (version, setting, shape, dtype). The text names the field and both values."""


class UnsupportedError(BpsError, TypeError):
    """The input is of a kind bpsfast does not sum: dtype, layout or device. Convert it first."""


class ClosedError(BpsError, RuntimeError):
    """*You* closed this (or never opened it, or forked), then used it. Fix the caller."""


class BusyError(BpsError, RuntimeError):
    """The same name was pushed twice before the first round was waited for. Fix the caller."""


class PeerLostError(BpsError, ConnectionError):
    """A *peer* process went away; the text names its role, rank and address. Restart the job."""


class StallError(BpsError, TimeoutError):
    """A wait passed its deadline; the text names who is missing. Look at that process."""


class CapacityError(BpsError, MemoryError):
    """The machine cannot hold what the job asks for; the text gives both numbers."""


class DeviceError(BpsError, RuntimeError):
    """A GPU, its driver or CuPy failed: at a call of ours, or at work of yours that was enqueued before it."""


class ProtocolError(BpsError, RuntimeError):
    """Bytes disagree with the format: mixed versions, or *our* bug. Please report it."""


def error_of(name: str, reason: str) -> BpsError:
    """Return the error that a message names by its class; unknown names become `PeerLostError`."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, BpsError):
        return kind(reason)
    return PeerLostError(f"{name}: {reason}" if name else reason)
