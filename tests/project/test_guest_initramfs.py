"""The guest's initial file system: modules in the order of their dependencies, and an archive the kernel can read."""
from __future__ import annotations

import gzip
import lzma
import stat

import pytest

from tests.guest import initramfs


def module(depends: str) -> bytes:
    """Return a file with a .modinfo like a kernel module's."""
    return f"ELF\0license=GPL\0depends={depends}\0name=x\0".encode()


@pytest.fixture
def root(tmp_path):
    """Unpacked packages: busybox, and modules like those of Debian 12 (plain) and 13 (xz)."""
    folder = tmp_path / "lib/modules/6.1.0/kernel"
    folder.mkdir(parents=True)
    (folder / "rdma_rxe.ko").write_bytes(module("ib_core,udp-tunnel"))
    (folder / "ib_uverbs.ko.xz").write_bytes(lzma.compress(module("ib_core")))
    (folder / "ib_core.ko").write_bytes(module(""))
    (folder / "udp-tunnel.ko").write_bytes(module("built_in"))
    (folder / "unrelated.ko").write_bytes(module("ib_core"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/busybox").write_bytes(b"busybox")
    return tmp_path


def entries(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Read a "newc" archive: mode and content by name."""
    found, at = {}, 0
    while at < len(archive):
        assert archive[at:at + 6] == b"070701" and at % 4 == 0
        fields = [int(archive[at + 6 + 8 * i:at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = archive[at + 110:at + 110 + length - 1].decode()
        start = at + 110 + length
        start += -start % 4
        found[name] = (mode, archive[start:start + size])
        at = start + size
        at += -at % 4
    return found


def test_a_module_comes_after_what_it_needs(root):
    names = [path.name for path in initramfs.in_load_order(root)]
    assert sorted(names) == ["ib_core.ko", "ib_uverbs.ko.xz", "rdma_rxe.ko", "udp-tunnel.ko"]
    assert names.index("rdma_rxe.ko") > max(names.index("ib_core.ko"), names.index("udp-tunnel.ko"))


def test_the_archive_holds_programs_and_unpacked_modules(root):
    found = entries(gzip.decompress(initramfs.pack(root)))
    assert list(found)[-1] == "TRAILER!!!"
    assert stat.S_ISDIR(found["proc"][0]) and stat.S_IMODE(found["init"][0]) == 0o755
    assert found["init"][1].startswith(b"#!/bin/busybox sh") and found["bin/busybox"][1] == b"busybox"
    modules = sorted(name for name in found if name.startswith("modules/"))
    assert [name.partition("-")[2] for name in modules] == [
        path.name.partition(".")[0] + ".ko" for path in initramfs.in_load_order(root)]
    assert all(found[name][1].startswith(b"ELF") for name in modules)


@pytest.mark.parametrize("length", range(8))
def test_every_length_is_padded(length):
    content = b"x" * length
    assert entries(initramfs.cpio([("a" * length, stat.S_IFREG, content), ("b", stat.S_IFREG, b"y")]))["b"][1] == b"y"
