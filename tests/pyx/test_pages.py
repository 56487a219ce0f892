"""Segments and windows: shared, aligned, pre-faulted, sealed, and never unmapped under somebody's feet."""
import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from bpsfast.pyx.pages import Segment, Shadow, Window, huge_page_nbytes, pool_nbytes

PAGE = mmap.PAGESIZE


def resident_nbytes(segment):
    """Bytes of the segment's memfd that have memory behind them."""
    return os.fstat(segment.fileno()).st_blocks * 512


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 << 20])
def test_a_segment_is_whole_zeroed_prefaulted_pages(nbytes):
    with Segment(nbytes, huge=False) as segment:
        assert segment.nbytes == -(-nbytes // PAGE) * PAGE
        assert segment.address % PAGE == 0
        assert resident_nbytes(segment) >= segment.nbytes
        assert not any(bytes(memoryview(segment)[:4096]))


def test_populate_off_leaves_the_pages_for_later():
    with Segment(64 << 20, huge=False, populate=False) as segment:
        assert resident_nbytes(segment) == 0


def test_another_mapping_of_the_descriptor_sees_the_bytes():
    with Segment(2 * PAGE) as segment:
        left, right = socket.socketpair(socket.AF_UNIX)
        with left, right:
            socket.send_fds(left, [b"x"], [segment.fileno()])
            _, fds, _, _ = socket.recv_fds(right, 1, 1)
        with Segment.attach(fds[0]) as seen, Segment.attach(os.dup(segment.fileno()), writable=True) as written:
            memoryview(written)[PAGE] = 7
            assert memoryview(seen)[PAGE] == 7 == memoryview(segment)[PAGE]
            assert memoryview(seen).readonly and not memoryview(written).readonly


def test_a_segment_cannot_be_resized_by_whoever_has_the_descriptor():
    with Segment(PAGE) as segment:
        for nbytes in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fileno(), nbytes)
        with pytest.raises(PermissionError):  # the seals themselves are sealed
            fcntl.fcntl(segment.fileno(), 1033, 8)


def test_close_is_refused_while_an_export_lives_and_idempotent_after():
    segment = Segment(PAGE)
    array = np.frombuffer(memoryview(segment)[:64], np.uint8)
    with pytest.raises(BufferError, match="1 live export"):
        segment.close()
    array[:] = 3
    del array
    segment.close()
    segment.close()
    assert segment.closed
    with pytest.raises(ValueError, match="closed segment"):
        memoryview(segment)


def test_a_bad_size_is_refused():
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="nbytes > 0"):
            Segment(nbytes)


def test_no_memory_is_an_error_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="memfd segment"):
        Segment(1 << 60, populate=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_attach_of_what_is_no_memory_raises():
    read, write = os.pipe()
    with pytest.raises(OSError, match="mmap"):
        Segment.attach(read)
    os.close(read)
    os.close(write)


def test_a_window_joins_runs_of_several_segments():
    with Segment(4 * PAGE) as a, Segment(2 * PAGE) as b:
        for segment, mark in ((a, 1), (b, 100)):
            for page in range(segment.nbytes // PAGE):
                memoryview(segment)[page * PAGE] = mark + page
        window = Window([(a.fileno(), 2 * PAGE, PAGE), (b.fileno(), 0, 2 * PAGE), (a.fileno(), 0, 100)])
        view = memoryview(window)
        assert [view[page * PAGE] for page in range(4)] == [3, 100, 101, 1]
        assert view.readonly
        memoryview(b)[PAGE] = 55  # live, not a copy
        assert view[2 * PAGE] == 55
        with pytest.raises(BufferError):
            window.close()
        view.release()
        window.close()


@pytest.mark.parametrize("extents", [[], [(0, 1, PAGE)], [(0, 0, 10), (0, 0, PAGE)]])
def test_a_window_of_broken_pages_is_refused(extents):
    with pytest.raises(ValueError):
        Window(extents)


def test_a_window_of_a_bad_descriptor_leaves_nothing():
    def mappings():
        with open("/proc/self/maps") as maps:
            return len(maps.readlines())

    before = mappings()
    for _ in range(10):
        with pytest.raises(OSError, match="mmap"):
            Window([(-1, 0, PAGE)])
    assert mappings() < before + 10  # the allocator may have made one meanwhile


_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def huge_nbytes(address):
    """Return how many bytes of the mapping at *address* are mapped by huge pages, as the kernel tells."""
    with open("/proc/self/smaps") as file:
        sections = file.read().split(f"{address:x}-", 1)[1]
    return int(sections.split("ShmemPmdMapped:", 1)[1].split()[0]) * 1024


def why_no_huge_pages(nbytes):
    """Return why the kernel cannot make *nbytes* of huge pages on request, or None: asked with none of our code."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.memfd_create("probe")
    try:
        os.ftruncate(fd, 2 * nbytes)
        with mmap.mmap(fd, 2 * nbytes) as memory:
            view = (ctypes.c_char * len(memory)).from_buffer(memory)
            start = ctypes.addressof(view)
            offset = -start % (2 << 20)
            del view
            again = libc.mmap
            again.restype, again.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                                                              ctypes.c_int, ctypes.c_int, ctypes.c_long]
            place = again(start + offset, nbytes, 3, mmap.MAP_SHARED | 0x10, fd, 0)  # MAP_FIXED: aligned as offset 0 is
            memory[offset : offset + nbytes] = bytes(nbytes)
            whole = nbytes // (2 << 20) * (2 << 20)
            if libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(whole), 25):  # MADV_COLLAPSE
                return f"the kernel makes no huge pages on request: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(fd)
    return None


@pytest.mark.parametrize("nbytes", [2 << 20, (5 << 20) + 4096, 64 << 20])
def test_huge_pages_are_made_without_a_pool(nbytes):
    why = why_no_huge_pages(nbytes)
    if why:
        pytest.skip(why)
    with Segment(nbytes) as segment:
        whole = nbytes // (2 << 20) * (2 << 20)
        assert huge_nbytes(segment.address) == whole
        assert resident_nbytes(segment) >= segment.nbytes
        assert not np.frombuffer(segment, np.uint8).any()
        memoryview(segment)[-1] = 9
        with Segment.attach(os.dup(segment.fileno())) as seen:
            assert huge_nbytes(seen.address) == whole and memoryview(seen)[-1] == 9
    with Segment(nbytes, huge=False) as segment:
        assert huge_nbytes(segment.address) == 0 or "[always]" in Path(_SHMEM_ENABLED).read_text()


@contextlib.contextmanager
def pool_of_huge_pages(n):
    path = "/proc/sys/vm/nr_hugepages"
    with open(path) as file:
        before = file.read()
    try:
        with open(path, "w") as file:
            file.write(str(n))
    except PermissionError:
        pytest.skip("needs root: the pool of huge pages cannot be changed")
    try:
        yield
    finally:
        with open(path, "w") as file:
            file.write(before)


@pytest.mark.root
def test_huge_pages_are_used_when_the_pool_holds_enough():
    with pool_of_huge_pages(16):
        if huge_page_nbytes() < 16 << 20:
            pytest.skip(f"the kernel gave {huge_page_nbytes()} bytes of huge pages, 16 MiB were asked for")
        with Segment(6 << 20) as segment:
            assert segment.page_nbytes == 2 << 20
            memoryview(segment)[5 << 20] = 1
        with Segment(6 << 20, huge=False) as segment:
            assert segment.page_nbytes == PAGE


@pytest.mark.root
@pytest.mark.parametrize("n_pages", [0, 2])
def test_an_empty_or_short_pool_falls_back_to_ordinary_pages(n_pages):
    with pool_of_huge_pages(n_pages), Segment(16 << 20) as segment:
        assert segment.page_nbytes == PAGE
        memoryview(segment)[:] = b"\1" * segment.nbytes  # no SIGBUS


def test_a_shadow_is_addresses_and_no_memory():
    reader, writer = os.pipe()
    shadow = Shadow(os.dup(reader), 4 * PAGE)
    with pytest.raises(BufferError):
        memoryview(shadow)
    for address in (shadow.address, shadow.address + 4 * PAGE - 1):  # the kernel says what a CPU would die of
        with pytest.raises(OSError, match="Bad address"):
            os.writev(writer, [(ctypes.c_char * 1).from_address(address)])
    fd = shadow.fileno()
    shadow.close()
    shadow.close()
    assert shadow.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="pages"):
        Shadow(reader, PAGE + 1)
    os.close(reader)
    os.close(writer)


def test_a_shadow_of_a_memfd_is_its_memory_until_it_is_shut():
    with Segment(2 * PAGE, huge=False) as segment:
        shadow = Shadow(os.dup(segment.fileno()), segment.nbytes, maps=True)
        view = memoryview(shadow)
        view[3] = 7
        assert memoryview(segment)[3] == 7
        with pytest.raises(BufferError, match="live exports"):
            shadow.close()
        view.release()
        shadow.shut()
        with pytest.raises(BufferError):
            memoryview(shadow)
        shadow.close()
        with pytest.raises(ValueError, match="closed"):
            shadow.shut()


def test_a_window_on_the_pool_of_huge_pages_is_refused_in_words():
    """mmap would round its last page up to 2 MiB, over whatever is mapped behind it."""
    try:
        fd = os.memfd_create("pool", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as exc:
        pytest.skip(f"this kernel has no huge pages of 2 MiB: {exc}")
    try:
        os.ftruncate(fd, 4 << 20)
        words = r"extent 1 .* lies in the pool of huge pages, of 2097152 bytes each: .* pool=False"
        with Segment(PAGE) as segment, pytest.raises(ValueError, match=words):
            Window([(segment.fileno(), 0, PAGE), (fd, 0, PAGE)])
    finally:
        os.close(fd)


@pytest.mark.root
def test_what_a_segment_takes_of_the_pool_is_known_before():
    assert pool_nbytes(1 << 50) == pool_nbytes(PAGE) == 0
    with pool_of_huge_pages(16):
        free = huge_page_nbytes()
        if free < 16 << 20:
            pytest.skip(f"the kernel gave {free} bytes of huge pages, 16 MiB were asked for")
        assert pool_nbytes(6 << 20) == pool_nbytes((6 << 20) - 1) == 6 << 20
        assert pool_nbytes(6 << 20, free - (8 << 20)) == 6 << 20 and pool_nbytes(6 << 20, free - (7 << 20)) == 0
        with Segment(6 << 20, falls_back=False) as segment:
            assert segment.page_nbytes == 2 << 20 and huge_page_nbytes() == free - (6 << 20)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Segment(1 << 40, falls_back=False)
