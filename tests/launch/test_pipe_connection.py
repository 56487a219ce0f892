"""Tests messages over pipes: they arrive whole and in order, whatever comes before them and however it is cut."""
from __future__ import annotations

import contextlib
import itertools
import os

import pytest
from hypothesis import given, strategies as st

from bpsfast.launch.remote_protocol import MARK, Alive, Ended, FromAgent, Here, PipeConnection, Said
from bpsfast.orchestration.errors import ProtocolError

_MESSAGES = [Here(1, "0.1.0", "3.11", ["10.0.0.1"]), Said(3, True, b"\x00\xff" * 50), Ended(3, -9), Alive()]


@contextlib.contextmanager
def pipes():
    """Yield the launcher's line, and the descriptor that its peer writes to."""
    came, theirs = os.pipe()
    away, leaves = os.pipe()
    try:
        yield PipeConnection(came, leaves, FromAgent, after_mark=True), theirs, away
    finally:
        for fd in (came, theirs, away, leaves):
            with contextlib.suppress(OSError):
                os.close(fd)


def written(messages) -> bytes:
    """Return what an agent writes for *messages*, its mark first."""
    source, target = os.pipe()
    try:
        line = PipeConnection(source, target, FromAgent, after_mark=False)
        line.mark()
        for message in messages:
            line.send(message)
        return os.read(source, 1 << 16)
    finally:
        os.close(source)
        os.close(target)


@given(noise=st.one_of(st.binary(max_size=100), st.just(b"Welcome!\n" * 20), st.just(MARK[:-1]), st.just(MARK[:3])),
       cuts=st.lists(st.integers(0, 400), max_size=8))
def test_messages_arrive_in_any_pieces_behind_any_noise(noise, cuts):
    if MARK in noise:
        return
    data = noise + written(_MESSAGES)
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = []
    with pipes() as (line, theirs, _):
        for begin, end in itertools.pairwise(ends):
            os.write(theirs, data[begin:end])
            found += line.receive()
        assert found == _MESSAGES and line.noise == noise and line.receive() == []


def test_of_endless_noise_the_end_is_kept():
    with pipes() as (line, theirs, _):
        for _ in range(100):
            os.write(theirs, b"x" * 4096)
            assert line.receive() == []
        assert len(line.noise) < (1 << 16) + len(MARK)
        os.write(theirs, b"last" + written([Alive()]))
        assert line.receive() == [Alive()]
        assert line.noise.endswith(b"xlast")


def test_a_full_pipe_keeps_nobody_waiting():
    with pipes() as (line, _, away):
        message = Said(0, False, b"y" * 50_000)
        for _ in range(10):
            line.send(message)
        assert line.pending_nbytes > 0
        nbytes = 0
        while line.pending_nbytes:
            nbytes += len(os.read(away, 1 << 20))
            line.flush()
        os.close(line.target)
        while data := os.read(away, 1 << 20):
            nbytes += len(data)
        assert nbytes > 10 * 50_000


def test_an_end_is_told():
    with pipes() as (line, theirs, away):
        os.close(theirs)
        with pytest.raises(EOFError):
            line.receive()
        os.close(away)
        with pytest.raises(BrokenPipeError):
            line.send(Alive())


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x01\x00\x00\x00\xc0"])
def test_bytes_that_are_no_message_are_an_error(data):
    with pipes() as (line, theirs, _):
        os.write(theirs, MARK + data)
        with pytest.raises(ProtocolError):
            line.receive()
