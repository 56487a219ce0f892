"""Records and process files for tests of traces."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bpsfast.base.trace_records import KINDS, RECORD, Span
from bpsfast.trace import Origin, Part, write

NUMBERS = {name: number for number, (name, _) in KINDS.items()}


def record(kind: str, begin_ns: int, end_ns: int, part: int = 0, round_: int = 1, thread: int = 0,
           nbytes: int = 4096) -> bytes:
    """Return one native record."""
    return RECORD.pack(begin_ns, end_ns, part, round_, NUMBERS[kind], thread, nbytes)


def send(begin_ns: int, end_ns: int, order: int, part: int = 0, peer: int = 1, pass_: int = 1, round_: int = 1,
         nbytes: int = 100) -> Span:
    """Return one write's time in the queue."""
    return Span(begin_ns, end_ns, "credit", {"part": part, "round": round_, "nbytes": nbytes, "peer": peer,
                                             "pass": pass_, "order": order})


def job(folder: Path, **facts: Any) -> dict[int, Part]:
    """Write the traces of one round of one partition: rank 0 of node 0 gives it, node 1 owns it and sums rank 1's too.

    Times in microseconds: copied 0 to 10, on the wire 20 to 50, received until 45, summed 50 to 60, back on the wire
    65 to 90, received until 85, taken 90 to 95; rank 0 waits from 12 to 90.
    """
    parts = {0: Part("weight", 0, 1, 1, 0)}
    us = 1000
    write(folder / "0", "node 0", b"".join([
        record("wire", 20 * us, 50 * us, thread=7), record("receive", 66 * us, 85 * us, thread=7),
    ]), parts, Origin(node=0, peers={7: 1}, credit_nbytes=1000, **facts), [send(15 * us, 20 * us, 0, nbytes=4096)])
    write(folder / "1", "node 1", b"".join([
        record("receive", 21 * us, 45 * us, thread=3), record("gather", 5 * us, 45 * us),
        record("queue", 45 * us, 50 * us), record("sum", 50 * us, 60 * us, nbytes=8192),
        record("wire", 65 * us, 90 * us, thread=3),
    ]), parts, Origin(node=1, peers={3: 0}, credit_nbytes=1000),
        [send(60 * us, 65 * us, 1, peer=0, nbytes=4096)])
    write(folder / "2", "rank 0", record("copy", 0, 10 * us) + record("wait", 12 * us, 90 * us, nbytes=0)
          + record("deliver", 90 * us, 95 * us), parts, Origin(node=0, rank=0))
    write(folder / "3", "rank 1", record("push", 2 * us, 3 * us, nbytes=1), parts, Origin(node=1, rank=1))
    gather(folder)
    return parts


def gather(folder: Path) -> None:
    """Move files that one process wrote for several into *folder*, each with the name of its process."""
    for path in sorted(folder.glob("*/*.trace.json")):
        path.rename(folder / path.name)
        path.parent.rmdir()


def change(path: Path, **facts: Any) -> None:
    """Change the *facts* in a process file."""
    document = json.loads(path.read_text())
    document["otherData"].update(facts)
    path.write_text(json.dumps(document))
