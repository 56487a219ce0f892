"""Bytes of any length among members who do not know how many there are."""
from __future__ import annotations

from bpsfast.collectives.group import make_group
from bpsfast.trainer import process


def say():
    session = process.current()
    group = make_group(session, range(session.size))
    own = bytes([session.rank]) * (session.rank * 1000)
    said = group.broadcast_bytes(own if session.rank == 2 else b"not looked at", 2)
    found = said, group.broadcast_bytes(b"", 0), group.all_gather_bytes(own)
    group.close()
    return found


def test_all_members_get_them(job):
    for said, nothing, each in job(ranks=(2, 1)).run(say):
        assert said == b"\2" * 2000 and nothing == b""
        assert each == [b"", b"\1" * 1000, b"\2" * 2000]
