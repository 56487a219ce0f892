"""What decoding somebody else's bytes may raise: more than msgspec's own errors."""
from __future__ import annotations

import msgspec

#: Strings that are no UTF-8, and nesting without end, raise Python's errors.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
