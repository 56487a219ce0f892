"""Tests writing to a pipe whose reader stops: nothing blocks, and nothing is lost or out of order."""
from __future__ import annotations

import io
import os

import pytest

from bpsfast.launch.output import OutputStream, is_one


@pytest.fixture
def pipe():
    source, target = os.pipe()
    with open(source, "rb", buffering=0) as reader, open(target, "wb") as writer:
        yield reader, writer


@pytest.mark.timeout(20)
def test_what_a_full_pipe_does_not_take_waits_in_order(pipe, no_leaks):
    reader, writer = pipe
    outlet = OutputStream(writer)
    data = b"".join(b"%07d\n" % i for i in range(50_000))
    for begin in range(0, len(data), 3000):
        outlet.write(data[begin:begin + 3000])
    assert outlet.pending_nbytes > 0
    assert os.get_blocking(writer.fileno()), "its mode belongs to others, too"
    came = b""
    while len(came) < len(data):
        came += reader.read(1 << 16)
        outlet.flush()
    assert came == data and outlet.pending_nbytes == 0


def test_what_waits_can_be_dropped(pipe, no_leaks):
    reader, writer = pipe
    outlet = OutputStream(writer)
    outlet.write(bytes(1 << 20))
    pending = outlet.pending_nbytes
    assert outlet.drop() == pending > 0 == outlet.pending_nbytes
    assert len(reader.read(1 << 20)) == (1 << 20) - pending


def test_a_reader_that_has_gone_is_an_error_once(no_leaks):
    source, target = os.pipe()
    with open(target, "wb") as writer:
        outlet = OutputStream(writer)
        outlet.write(bytes(1 << 20))
        os.close(source)
        with pytest.raises(BrokenPipeError):
            outlet.flush()
        assert outlet.pending_nbytes == 0
        outlet.flush()


def test_files_and_memory_take_everything(tmp_path):
    memory = io.BytesIO()
    with (tmp_path / "file").open("wb") as file:
        for outlet in (OutputStream(memory), OutputStream(file)):
            outlet.write(bytes(1 << 20))
            assert outlet.fd is None and outlet.pending_nbytes == 0
    assert memory.getbuffer().nbytes == (tmp_path / "file").stat().st_size == 1 << 20


def test_two_names_of_one_pipe_are_known(pipe, tmp_path):
    _, writer = pipe
    with open(os.dup(writer.fileno()), "wb") as again, (tmp_path / "file").open("wb") as file:
        assert is_one(writer, again)
        assert not is_one(writer, file) and not is_one(writer, io.BytesIO()) and not is_one(io.BytesIO(), io.BytesIO())
