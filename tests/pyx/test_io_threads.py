"""I/O threads where system calls are forbidden, and for what is no socket."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bpsfast.pyx.tcp import IoThreads, Slots, Stream
from tests.support.streams import EPOCH, mailbox

#: Lets the system call number {call} give EPERM in this process, as older container runtimes do.
_FORBID = """
import ctypes, struct
BPF = ((0x20, 0, 0, 0), (0x15, 0, 1, {call}), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000))
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in BPF))
program = struct.pack("HxxxxxxP", len(BPF), ctypes.addressof(filters))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
assert libc.syscall({call}, -1, None, 0, None, None, 0) == -1 and ctypes.get_errno() == 1
"""

_STREAMS = """
import time
import numpy as np
from bpsfast.pyx import engine as native
from tests.support.streams import bound, events, mailbox, pair, stream

with mailbox() as engine, pair() as (left, right):
    sender, receiver = stream(engine, left, send_buffer_nbytes=1 << 16), stream(engine, right)
    payload = np.full(4 << 20, 7, np.uint8)
    with bound(engine, sender, receiver, payload.nbytes) as got:
        for round_ in (1, 2, 3):
            sender.post(1, round_, 0, payload.ctypes.data, payload.nbytes)
            assert events(engine, 1)[0][0] == native.EVENT_DELIVERED
        begin_s, cpu_s = time.monotonic(), time.process_time()
        while time.monotonic() < begin_s + 0.5:
            time.sleep(0.1)
        assert time.process_time() - cpu_s < 0.25, "a thread spins"
        del got
"""

_URING = """
from bpsfast.base.settings import Settings
from bpsfast.node.transport import tcp
from bpsfast.orchestration.errors import ConfigError

try:
    tcp.io_threads_of(Settings(io_backend="io_uring"))
except ConfigError as exc:
    assert "I/O thread 0 of" in str(exc) and "BPSFAST_IO_BACKEND=epoll" in str(exc), exc
else:
    raise AssertionError("io_uring is forbidden")
tcp.io_threads_of(Settings()).close()
"""


@pytest.mark.parametrize(("call", "program"), [(441, _STREAMS), (425, _URING)], ids=["epoll_pwait2", "io_uring_setup"])
def test_a_system_call_that_is_forbidden(call, program):
    """Streams go on with epoll_wait, and threads do not spin; without io_uring the error says what to do."""
    done = subprocess.run([sys.executable, "-c", _FORBID.format(call=call) + program], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_stream_that_cannot_be_watched_can_only_be_closed():
    ours, theirs = os.pipe()
    n_descriptors = len(os.listdir("/proc/self/fd"))
    io_threads = IoThreads(2)
    with mailbox() as engine:
        made = Stream(ours, io_threads, peer=engine.add_wire_peer(), engine=engine.handle,
                      arrived=engine.arrived_address, notify=engine.notify_address, slots=Slots(4, epoch=EPOCH),
                      keep=engine)
        with pytest.raises(OSError, match="cannot be watched"):
            made.start()
        with pytest.raises(ValueError, match="started once"):
            made.start()
        made.close()
        io_threads.close()
        del made
    os.close(theirs)
    assert len(os.listdir("/proc/self/fd")) <= n_descriptors - 2
