"""Trouble with verbs, with either provider: every case is an error that says what was tried, found, and what to do."""
from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
import textwrap

import pytest

from bpsfast.hardware.verbs.completions import CompletionError, raise_failure
from tests.guest.hosts import DEVICES, GID_INDEX, HOSTS
from tests.guest.spare_device import PULL_OUT, REMOVE_DRIVER, spare_device
from tests.guest.verbs_end import End, connected, until

RETRIES = 12


@pytest.fixture
def ends(verbs):
    with connected(verbs) as both:
        yield both


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, timeout=60)


def python(verbs, code: str, before: str = "") -> str:
    """Run *code* with ``verbs`` in a process of its own, after the shell commands *before*; return what it printed."""
    name = "native" if verbs.__name__.endswith("pyx.verbs") else "pyverbs"
    program = f"from bpsfast.hardware.verbs import provider\nverbs = provider({name!r})\n{textwrap.dedent(code)}"
    command = ["unshare", "--mount", "sh", "-c", f'{before}\nexec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- what the machine lacks ---------------------------------------------------------------------------------

def test_no_library(verbs):
    shown = python(verbs, "", before="""
        for lib in /usr/lib/*/libibverbs.so.1 /usr/lib64/libibverbs.so.1; do
            [ -e "$lib" ] && mount --bind /dev/null "$lib"; done
        set -- "$1" "$2" "import sys
try: exec(sys.argv[1])
except OSError as exc: print(type(exc).__name__, exc)" "$3" """)
    assert shown.startswith("VerbsMissing") and "libibverbs.so.1 cannot be loaded" in shown
    assert "libibverbs1 ibverbs-providers" in shown


def test_no_provider_for_the_device(verbs):
    shown = python(verbs, """
        print(verbs.devices())
        try: verbs.Device("rxe0")
        except OSError as exc: print(exc.errno, exc)
        """, before="mount -t tmpfs none /etc/libibverbs.d")
    assert shown.startswith(f"[]\n{errno.ENODEV} ")
    assert "the kernel has it" in shown and "install ibverbs-providers" in shown


def test_no_such_device(verbs):
    with pytest.raises(OSError, match=r"no RDMA device 'mlx5_9': libibverbs has rxe0, rxe1") as caught:
        verbs.Device("mlx5_9")
    assert caught.value.errno == errno.ENODEV


def test_no_device_file(verbs):
    shown = python(verbs, """
        try: verbs.Device("rxe0")
        except OSError as exc: print(exc)
        """, before="mount -t tmpfs none /dev/infiniband")
    assert "--device=/dev/infiniband" in shown


def test_little_memory_may_be_locked(verbs):
    shown = python(verbs, """
        d = verbs.Device("rxe0"); p = verbs.ProtectionDomain(d)
        small = verbs.MemoryRegion(p, bytearray(4096))
        try: verbs.MemoryRegion(p, bytearray(1 << 20))
        except OSError as exc: print(exc.errno, exc)
        """, before='ulimit -l 64; set -- setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"')
    assert shown.startswith(f"{errno.ENOMEM} ") and "nbytes=1048576" in shown
    assert "may lock 65536 bytes" in shown and "ulimit -l unlimited" in shown and "LimitMEMLOCK" in shown


def test_refused_registrations(verbs, ends):
    domain = ends[0].domain
    with pytest.raises(BufferError):
        verbs.MemoryRegion(domain, bytes(4096))
    with pytest.raises(ValueError, match="nbytes > 0"):
        verbs.MemoryRegion(domain, bytearray())
    with pytest.raises(OSError, match=r"8192 bytes at 0x1000 are not all mapped") as caught:
        verbs.MemoryRegion.at(domain, 4096, 8192, None)
    assert caught.value.errno == errno.EFAULT
    buffer = bytearray(4096)
    with pytest.raises(OSError):
        verbs.MemoryRegion.at(domain, id(buffer), 1 << 46, buffer)
    buffer.extend(b"x")  # no export stayed behind


def test_a_dma_buf_is_refused_by_a_driver_that_cannot(ends):
    """Our own: pyverbs takes no descriptor. Of another device's memory rxe says EOPNOTSUPP, whatever it is."""
    from bpsfast.pyx import verbs
    from bpsfast.pyx.pages import Segment, Shadow

    domain = ends[0].domain
    if not isinstance(domain, verbs.ProtectionDomain):
        pytest.skip("pyverbs takes no descriptor")
    with Segment(1 << 21, huge=False) as segment:
        fd = dma_buf(segment) or os.dup(segment.fileno())
        shadow = Shadow(fd, 1 << 21)
        n_children = domain.children
        with pytest.raises(OSError, match=r"ibv_reg_dmabuf_mr\(rxe0, .*the driver of rxe0 cannot use another device's "
                                          "memory") as caught:
            verbs.MemoryRegion.of_dmabuf(domain, fd, shadow.nbytes, shadow.address)
        assert caught.value.errno == errno.EOPNOTSUPP and domain.children == n_children
        with pytest.raises(ValueError, match="nbytes > 0"):
            verbs.MemoryRegion.of_dmabuf(domain, fd, 0, shadow.address)
        shadow.close()


def dma_buf(segment) -> int:
    """Return a dma-buf of *segment*'s pages, by the kernel's udmabuf; 0 if it has none."""
    try:
        device = os.open("/dev/udmabuf", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        wanted = struct.pack("IIQQ", segment.fileno(), 1, 0, segment.nbytes)  # memfd, close on exec, offset, size
        return fcntl.ioctl(device, 0x40187542, wanted)  # UDMABUF_CREATE
    except OSError:
        return 0
    finally:
        os.close(device)



def test_a_queue_beyond_the_limits(verbs, ends):
    end = ends[0]
    limits = end.device.attributes
    with pytest.raises(OSError, match=f"max_cqe={limits['max_cqe']}"):
        verbs.CompletionQueue(end.device, limits["max_cqe"] + 1)
    with pytest.raises(OSError, match=f"max_qp_wr={limits['max_qp_wr']}"):
        verbs.QueuePair(end.domain, end.queue, end.queue, max_send=limits["max_qp_wr"] + 1, max_recv=1)
    with pytest.raises(ValueError, match="depth >= 1"):
        verbs.CompletionQueue(end.device, 0)
    with pytest.raises(ValueError, match="max_recv >= 1"):
        verbs.QueuePair(end.domain, end.queue, end.queue, max_send=1, max_recv=0)


# -- connecting ---------------------------------------------------------------------------------------------

@pytest.fixture
def unconnected(verbs):
    with End(verbs, DEVICES[0]) as left, End(verbs, DEVICES[1]) as right:
        yield left, right


def test_a_wrong_gid_index(unconnected):
    left, right = unconnected
    gid = right.device.gid(1, GID_INDEX)
    left.pair.to_init(1)
    with pytest.raises(OSError, match=r"rxe0 port 1.*INIT -> RTR.*gid_index=200.*GID table is empty.*bpsfast gids"):
        left.pair.to_rtr(right.pair.number, 1, gid=gid, gid_index=200)
    with pytest.raises(OSError, match=r"index 5000.*has 1024 GIDs") as caught:
        left.device.gid(1, 5000)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match=r"port 3.*has 1 ports"):
        left.device.port(3)


def test_a_transition_that_is_not_allowed_shows_its_attributes(unconnected):
    left, right = unconnected
    gid = right.device.gid(1, GID_INDEX)
    with pytest.raises(OSError, match=r"RTR -> RTS with psn=\d+, timeout=14.*local GID -.*it is in RESET"):
        left.pair.to_rts()
    with pytest.raises(ValueError, match="16"):
        left.pair.to_rtr(1, 1, gid=b"short")
    with pytest.raises(OSError, match=r"rxe0 queue pair \d+: INIT -> RTR before to_init: it is in state RESET"):
        left.pair.to_rtr(right.pair.number, 5, gid=gid, gid_index=GID_INDEX)
    left.pair.to_init(1)
    left.pair.to_rtr(right.pair.number, 5, gid=gid, gid_index=GID_INDEX)
    with pytest.raises(OSError, match=r"refused INIT -> RTR with peer=\d+, peer_psn=6, .*remote GID 0000:.*:0a09:0002"):
        left.pair.to_rtr(right.pair.number, 6, gid=gid, gid_index=GID_INDEX)


def test_an_mtu_that_the_port_does_not_have(verbs):
    with spare_device(mtu=1500) as name, verbs.Device(name) as device:
        assert device.port()["active_mtu"] == 1024
        with verbs.ProtectionDomain(device) as domain, verbs.CompletionQueue(device, 8) as queue, \
                verbs.QueuePair(domain, queue, queue, max_send=1, max_recv=1) as pair:
            pair.to_init(1)
            with pytest.raises(ValueError, match="256, 512, 1024, 2048, 4096"):
                pair.to_rtr(1, 1, gid=device.gid(1, 0), mtu=1500)
            with pytest.raises(OSError, match="mtu=4096, but its active_mtu is 1024"):
                pair.to_rtr(1, 1, gid=device.gid(1, 0), mtu=4096)


def test_two_ends_with_different_mtus(unconnected):
    left, right = unconnected
    left.connect(right, rtr={"mtu": 4096})
    right.connect(left, rtr={"mtu": 1024})
    left.write(right, 4096)
    assert left.completions()[0][1] != 0
    with pytest.raises(CompletionError, match="WRITE of 4096 bytes"):
        raise_failure(left.pair)
    assert not right.bytes.any()


# -- links and devices that go away -------------------------------------------------------------------------

def test_a_port_that_goes_down(verbs):
    netdev = HOSTS[1].netdev
    with connected(verbs) as (left, right):
        try:
            sh(f"ip link set {netdev} down")
            until(lambda: right.device.port()["state"] == "DOWN")
            left.write(right)
            assert left.completions()[0][1] == RETRIES
            with pytest.raises(CompletionError, match=r"RETRY_EXC_ERR.*did not acknowledge"):
                raise_failure(left.pair)
            assert any("port" in about for _, about in right.device.events(5))
        finally:
            sh(f"ip link set {netdev} up")
            until(lambda: right.device.port()["state"] == "ACTIVE" and any(right.device.gid(1, GID_INDEX)))
    with connected(verbs) as (left, right):
        left.write(right)
        assert left.completions()[0][1] == 0


def test_a_device_that_the_kernel_has_taken_away_can_be_closed(verbs):
    shown = python(verbs, """
        import gc, os
        from tests.guest.spare_device import take_away
        from tests.guest.verbs_end import End
        end = End(verbs, "rxe0", events=True)  # what is loaded at first stays
        end.close()
        fds = len(os.listdir("/proc/self/fd"))
        memory = bytearray(4096)
        device = verbs.Device("rxe0")
        domain = verbs.ProtectionDomain(device)
        queue = verbs.CompletionQueue(device, 64, events=True)
        region = verbs.MemoryRegion(domain, memory)
        pairs = [verbs.QueuePair(domain, queue, queue, max_send=8, max_recv=8) for _ in range(2)]
        for pair in pairs:
            pair.to_init(1)
            pair.post_recv(1, region.address, 8, region.lkey)
        take_away(device)
        try: device.port()
        except OSError as exc: print(exc)
        for each in (*pairs, region, queue, domain, device):
            each.close()
            each.close()
            assert each.closed and not getattr(each, "children", 0), each
        memory.extend(b"x")  # no longer held for the device
        assert queue.pending == 0
        del pairs, pair, each, region, queue, domain, device
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == fds
        with End(verbs, "rxe0") as again:
            print(again.device.port()["state"])
        """)
    assert shown.startswith("[Errno 5] ibv_query_") and shown.endswith("\nACTIVE\n"), shown


def test_what_the_kernel_has_taken_away_may_be_dropped_unclosed(verbs):
    shown = python(verbs, """
        import gc, os, sys
        from tests.guest.spare_device import take_away
        from tests.guest.verbs_end import End
        sys.unraisablehook = print
        End(verbs, "rxe0", events=True).close()  # what is loaded at first stays
        fds = len(os.listdir("/proc/self/fd"))
        end = End(verbs, "rxe0", events=True)
        end.pair.to_init(1)
        end.receive()
        take_away(end.device)
        del end
        gc.collect()
        gc.collect()  # a queue that knows its queue pairs
        print(len(os.listdir("/proc/self/fd")) - fds)
        """)
    assert shown == "0\n"


@pytest.mark.parametrize("removal", [REMOVE_DRIVER, PULL_OUT], ids=" ".join)
def test_a_device_that_vanishes_under_live_objects(verbs, removal):
    """rxe waits for its users, once it is out of every list; other drivers take the device away from them."""
    before = len(os.listdir("/proc/self/fd"))
    with spare_device() as name:
        memory = bytearray(4096)
        device = verbs.Device(name)
        domain = verbs.ProtectionDomain(device)
        queue = verbs.CompletionQueue(device, 8, events=True)
        region = verbs.MemoryRegion(domain, memory)
        pair = verbs.QueuePair(domain, queue, queue, max_send=2, max_recv=2)
        pair.to_init(1)
        pair.post_recv(1, region.address, 8, region.lkey)
        process = subprocess.Popen(removal)
        try:
            until(lambda: name not in verbs.devices())
            with pytest.raises(OSError, match="no RDMA device 'rxe9'") as caught:
                verbs.Device(name)
            assert caught.value.errno == errno.ENODEV
            for each in (pair, region, queue, domain, device):
                each.close()
                assert each.closed
            memory.extend(b"x")  # no longer held for the device
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait(10)
    assert len(os.listdir("/proc/self/fd")) == before
