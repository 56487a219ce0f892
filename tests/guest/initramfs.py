"""The guest's first file system: busybox, `init.sh`, and the kernel modules in the order in which they are loaded."""
from __future__ import annotations

import gzip
import lzma
import re
import stat
from collections.abc import Iterable
from pathlib import Path

# crc32_pclmul is left out on purpose: emulated it is slower than crc32_generic, and the RoCE checksum is much of
# what a packet costs here.
MODULES = (
    "crc32_generic", "virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay",
    "bridge", "veth", "rdma_rxe", "rdma_ucm", "ib_uverbs",
)  # fmt: skip
_INIT = Path(__file__).with_name("init.sh")


def recipe() -> str:
    """Return a text that changes whenever a packed file system must be made anew."""
    return " ".join(MODULES) + _INIT.read_text() + Path(__file__).read_text()


def pack(root: Path) -> bytes:
    """Return the compressed file system, made of a kernel package and busybox-static unpacked below *root*."""
    busybox = next(path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.exists())
    folders = [(name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "modules", "proc", "sys", "dev")]
    files = [("init", stat.S_IFREG | 0o755, _INIT.read_bytes()),
             ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())]
    modules = [(f"modules/{i:03}-{path.name.split('.')[0]}.ko", stat.S_IFREG | 0o644, _content(path))
               for i, path in enumerate(in_load_order(root))]
    return gzip.compress(cpio(folders + files + modules), 1)


def in_load_order(root: Path) -> list[Path]:
    """Return the files of MODULES and of what they need, needed ones first.

    Names come from the files themselves (``depends=`` in a module's .modinfo); what is built into the kernel has no
    file and needs none.
    """
    paths = {path.name.split(".ko")[0].replace("-", "_"): path for path in root.rglob("*.ko*")}
    ordered: dict[str, Path] = {}

    def add(name: str) -> None:
        name = name.replace("-", "_")
        path = paths.get(name)
        if path is None or name in ordered:
            return
        found = re.search(rb"\0depends=([^\0]*)\0", _content(path))
        for needed in filter(None, found[1].decode().split(",") if found else []):
            add(needed)
        ordered[name] = path

    for name in MODULES:
        add(name)
    return list(ordered.values())


def _content(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return an archive, in the "newc" format that the kernel unpacks, of (name, mode, content), all owned by root."""
    archive = bytearray()
    trailer = ("TRAILER!!!", 0, b"")
    for number, (name, mode, content) in enumerate([*entries, trailer], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)
