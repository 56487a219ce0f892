"""For `bench summation`: counts packed arithmetic by register width, and non-temporal stores, in compiled code."""
from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_WIDTHS = {"zmm": 64, "ymm": 32, "xmm": 16}
_LINE = r"^\s*(?:[0-9a-f]+:\s+)?"
#: Packed sums, differences and products: ps, pd are of floats; b, w, d, q of integers.
_PACKED = re.compile(_LINE + r"v?(?:(?:add|sub|mul|fn?m(?:add|sub)\d*)p[sd]|padd[bwdq])\s.*?%([xyz]mm)", re.MULTILINE)
_PAST_CACHES = re.compile(_LINE + r"v?movnt(?:p[sd]|dq|i)\s", re.MULTILINE)
_TIMEOUT_S = 120.0


class Instructions(NamedTuple):
    """Counts of a piece of code; `vector_nbytes` is the widest register of packed arithmetic, 0 without any."""

    vector_nbytes: int
    n_packed: int
    n_past_caches: int


def count(text: str) -> Instructions:
    """Count in x86 assembly in AT&T syntax: a compiler's output, or a disassembly without raw bytes."""
    registers = _PACKED.findall(text)
    return Instructions(max((_WIDTHS[name] for name in registers), default=0), len(registers),
                        len(_PAST_CACHES.findall(text)))


def disassembly(library: Path) -> str | None:
    """Return the disassembly of a shared library, or None without objdump."""
    objdump = shutil.which("objdump")
    if objdump is None:
        return None
    done = subprocess.run([objdump, "--disassemble", "--no-show-raw-insn", str(library)], capture_output=True,
                          text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout
