"""Fetch Debian's kernel without installing it, and pack the few modules of it that a guest needs.

Everything lies in a cache folder (``$XDG_CACHE_HOME/bpsfast/guest``, by default below ``~/.cache``): the two packages
as downloaded, about 70 MB, and what was made from them. Once it is there, nothing is downloaded again. No privileges
are needed: apt only fetches, and checks the signatures as ever.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.guest import initramfs

FETCH_TIMEOUT_S = 180.0

# What is asked for on this machine -> Debian's package that holds it.
_NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "ip": "iproute2",
    "rdma": "iproute2",
    "unshare": "util-linux",
    "/etc/libibverbs.d/rxe.driver": "ibverbs-providers",
}
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class MissingError(Exception):
    """No guest can be had on this machine; the text says in one line why, and what would help."""


class Image(NamedTuple):
    """What QEMU boots: paths of the kernel and of the initramfs."""

    kernel: Path
    initramfs: Path


def missing() -> str | None:
    """Say in one line what this machine lacks for a guest, None if nothing; looks at no network and no cache."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the guest runs Debian's kernel for x86-64 Linux; this is {sys.platform} on {platform.machine()}"
    lacking = {name: package for name, package in _NEEDED.items() if not _there(name)}
    if lacking:
        verb = "is" if len(lacking) == 1 else "are"
        packages = " ".join(sorted(set(lacking.values())))
        return f"{', '.join(lacking)} {verb} missing: apt-get install {packages}"
    return None


def qemu() -> str:
    """Return the path of the emulator."""
    path = shutil.which("qemu-system-x86_64", path=_PATH)
    if path is None:
        raise MissingError(missing())
    return path


def cache_folder() -> Path:
    """Return the folder that keeps the kernel between sessions; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bpsfast" / "guest"


def prepare(refresh: bool = False) -> Image:
    """Return what boots a guest, fetched and packed before if need be; *refresh* asks for the newest kernel again.

    Any process; several may call it at once. Raises `MissingError` where it cannot be had.
    """
    if reason := missing():
        raise MissingError(reason)
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / "lock", FETCH_TIMEOUT_S):
            kernel = _package(cache, "linux-image-[0-9]*", _newest_kernel, refresh)
            busybox = _package(cache, "busybox-static", lambda: "busybox-static", refresh)
            return _image(cache, kernel, busybox)
    except OSError as exc:
        raise MissingError(f"the guest's kernel cannot be kept in {cache}: {exc}") from exc


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file *path*, made if need be; TimeoutError if another process holds it for *timeout_s*."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {timeout_s:g} s") from None
                time.sleep(0.1)
        yield


def _there(name: str) -> bool:
    return os.path.exists(name) if name.startswith("/") else shutil.which(name, path=_PATH) is not None


def _package(cache: Path, pattern: str, newest: Callable[[], str], refresh: bool) -> Path:
    """Return the path of a package in the cache; fetch what *newest* names if there is none."""
    kept = sorted(cache.glob(f"{pattern}_*.deb"), key=lambda path: path.stat().st_mtime)
    if kept and not refresh:
        return kept[-1]
    name = newest()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _apt(["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1",
              "-o", "Acquire::http::Timeout=20", name], Path(folder))
        (fetched,) = Path(folder).glob("*.deb")
        for old in kept:
            old.unlink()
        return fetched.rename(cache / fetched.name)


def _newest_kernel() -> str:
    found = re.search(r"Depends: (linux-image-\S+)", _apt(["apt-cache", "depends", "linux-image-amd64"], Path("/")))
    if found is None:
        raise MissingError("apt knows no package linux-image-amd64, Debian's kernel; the guest boots no other")
    return found[1]


def _apt(command: list[str], folder: Path) -> str:
    """Run apt in *folder* and return its output; MissingError with its last words where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}, check=False)
    except FileNotFoundError:
        raise MissingError(f"{command[0]} is missing: the guest boots the kernel of Debian's archive") from None
    except subprocess.TimeoutExpired:
        raise MissingError(f"{' '.join(command)} took more than {FETCH_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise MissingError(f"the guest's kernel cannot be fetched: `{command[0]} {command[1]} {command[-1]}` said "
                           f"{said!r}; as root, `apt-get update` may help")
    return done.stdout


def _image(cache: Path, kernel: Path, busybox: Path) -> Image:
    """Return the image made of two packages; unpack them if this was not done before."""
    stamp = hashlib.sha256("\0".join([kernel.name, busybox.name, initramfs.recipe()]).encode()).hexdigest()[:12]
    image = Image(cache / f"vmlinuz-{stamp}", cache / f"initramfs-{stamp}.gz")
    if image.kernel.exists() and image.initramfs.exists():
        return image
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root = Path(folder)
        for package in (kernel, busybox):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=FETCH_TIMEOUT_S)
        for old in [*cache.glob("vmlinuz-*"), *cache.glob("initramfs-*")]:
            old.unlink()
        (root / "packed").write_bytes(initramfs.pack(root))
        (root / "packed").rename(image.initramfs)
        next(root.glob("boot/vmlinuz-*")).rename(image.kernel)
    return image
