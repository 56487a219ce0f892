"""What the ranks of a trial have written, and what is wrong with it.

A step is right if every sum in it has each rank's input exactly once: its digest is that of the reading, which makes
the sums of all ranks the same, too.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gradients import expected, names


@dataclass
class RankHistory:
    """One rank's: digests by step, and how it ended ("" if it says nothing: it was killed, or hangs).

    `recoveries`: how often its node has gone on without somebody by then.
    """

    steps: dict[int, list[str]] = field(default_factory=dict)
    end: str = ""
    text: str = ""
    at_s: float = 0.0
    recoveries: int = 0


def read(path: Path) -> RankHistory:
    """Return the history in *path*, as far as it was written; a last line that was cut off is left out."""
    found = RankHistory()
    lines = path.read_text().split("\n") if path.exists() else []
    for line in lines[:-1]:
        fields: dict[str, Any] = json.loads(line)
        if "step" in fields:
            found.steps[fields["step"]] = fields["sums"]
        else:
            found.end, found.text, found.at_s = fields["end"], fields.get("text", ""), fields.get("at_s", 0.0)
            found.recoveries = fields.get("recoveries", 0)
    return found


def wrong_sums(histories: dict[int, RankHistory], machines: tuple[tuple[int, ...], ...]) -> list[str]:
    """Return, in words, every sum that is not the reading's, and every step that a rank has left out."""
    found = []
    steps = sorted({step for each in histories.values() for step in each.steps})
    right = {step: [expected(machines, step, i) for i in range(len(names(step)))] for step in steps}
    for rank, each in sorted(histories.items()):
        if sorted(each.steps) != list(range(len(each.steps))):
            found.append(f"rank {rank} has steps {sorted(each.steps)}")
        for step, sums in each.steps.items():
            found += [f"rank {rank}, step {step}, gradient {i}: {have} instead of {want}"
                      for i, (have, want) in enumerate(zip(sums, right[step])) if have != want]
    return found
