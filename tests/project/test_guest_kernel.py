"""The guest's kernel: downloaded once, packed again only after changes, and a one-line error if it is unavailable."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guest import initramfs, kernel

dpkg = pytest.mark.skipif(not Path("/usr/bin/dpkg-deb").exists(), reason="dpkg-deb is missing: this is not Debian")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A separate, empty cache, on a machine that can run a guest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "_NEEDED", {})
    folder = tmp_path / "bpsfast" / "guest"
    folder.mkdir(parents=True)
    return folder


def package(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """Make a Debian package with *files*."""
    root = folder / "made"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: x\n")
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    subprocess.run(["dpkg-deb", "-b", "-Znone", root, folder / f"{name}_1_all.deb"], check=True, timeout=60,
                   capture_output=True)
    subprocess.run(["rm", "-r", root], check=True)


def apt(folder: Path, script: str, monkeypatch) -> None:
    """Put an apt-get and an apt-cache into PATH before the real ones."""
    folder.mkdir()
    for name in ("apt-get", "apt-cache"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@dpkg
def test_what_is_in_the_cache_is_not_fetched_again(cache, tmp_path, monkeypatch):
    package(cache, "linux-image-6.1.0-1-amd64", {"boot/vmlinuz-6.1.0-1-amd64": b"kernel"})
    package(cache, "busybox-static", {"bin/busybox": b"busybox"})
    apt(tmp_path / "bin", "echo called >&2; exit 1", monkeypatch)
    image = kernel.prepare()
    assert image.kernel.read_bytes() == b"kernel" and image.initramfs.stat().st_size > 0
    before = image.initramfs.stat().st_mtime_ns
    assert kernel.prepare() == image and image.initramfs.stat().st_mtime_ns == before
    monkeypatch.setattr(initramfs, "MODULES", ("changed",))
    again = kernel.prepare()
    assert again != image and not image.kernel.exists() and not image.initramfs.exists()
    with pytest.raises(kernel.MissingError, match="called"):
        kernel.prepare(refresh=True)
    assert again.kernel.exists()


def test_a_machine_without_a_network_says_what_apt_said(cache, tmp_path, monkeypatch):
    apt(tmp_path / "bin", "echo 'E: no route' >&2; exit 100", monkeypatch)
    with pytest.raises(kernel.MissingError, match=r"apt-cache depends linux-image-amd64` said 'E: no route'; as root"):
        kernel.prepare()


def test_an_archive_without_debians_kernel_is_named(cache, tmp_path, monkeypatch):
    apt(tmp_path / "bin", "echo linux-image-generic", monkeypatch)
    with pytest.raises(kernel.MissingError, match="no package linux-image-amd64"):
        kernel.prepare()


def test_missing_programs_are_named_with_their_package(monkeypatch):
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        needed = {"no-such-emulator": "qemu-system-x86", "/no/driver": "ibverbs-providers"}
        monkeypatch.setattr(kernel, "_NEEDED", needed)
        assert kernel.missing() == ("no-such-emulator, /no/driver are missing: "
                                    "apt-get install ibverbs-providers qemu-system-x86")
    monkeypatch.setattr(kernel.platform, "machine", lambda: "riscv64")
    assert "riscv64" in kernel.missing()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "_NEEDED", {})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(kernel.MissingError, match="cannot be kept in") as caught:
        kernel.prepare()
    assert "\n" not in str(caught.value)


def test_a_lock_that_is_held_is_waited_for_in_vain(tmp_path):
    with kernel.locked(tmp_path / "lock", 1):
        with pytest.raises(TimeoutError, match="has held"):
            with kernel.locked(tmp_path / "lock", 0):
                pass
    with kernel.locked(tmp_path / "lock", 0):
        pass
