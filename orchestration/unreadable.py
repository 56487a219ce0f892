"""What msgspec raises for bytes that are no message: who decodes what others sent catches all of it."""
from __future__ import annotations

import msgspec

#: Strings need not be UTF-8, and nesting has no end: these two it does not turn into errors of its own.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
