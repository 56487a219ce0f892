"""Sizes as people write them: 4M, 4MB and 4MiB are all 4 * 1024**2 bytes, as in nccl-tests and perftest."""
from __future__ import annotations

import re

_SHIFTS = {"": 0, "K": 10, "M": 20, "G": 30}


def parse(text: str) -> int | None:
    """Return the bytes that *text* names, or None if it is no size."""
    match = re.fullmatch(r"(\d+)\s*(?:([KMG])(?:i?B)?|B?)", text.strip(), re.IGNORECASE)
    return int(match[1]) << _SHIFTS[(match[2] or "").upper()] if match else None
