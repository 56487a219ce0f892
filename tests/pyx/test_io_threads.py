"""I/O threads where a container forbids system calls that it does not know."""
from __future__ import annotations

import subprocess
import sys

import pytest

#: Streams move bytes both ways although epoll_pwait2 (441) gives EPERM, as in older container runtimes; and the idle
#: threads do not spin.
_PROGRAM = """
import ctypes, struct, time
import numpy as np
from bpsfast.pyx import engine as native
from tests.support.streams import bound, events, mailbox, pair, stream

BPF = ((0x20, 0, 0, 0), (0x15, 0, 1, 441), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000))
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in BPF))
program = struct.pack("HxxxxxxP", len(BPF), ctypes.addressof(filters))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
assert libc.syscall(441, -1, None, 0, None, None, 0) == -1 and ctypes.get_errno() == 1
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")
def test_streams_work_where_a_container_answers_eperm():
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
