"""Keeps the machine code of compiled kernels on disk, and loads it without numba and LLVM, which only compile.

numba imports LLVM and takes 150 MB even where it only reads its own cache. A node whose sums are all here does not
import it. A file holds one kernel as an ELF object, as LLVM has written it. `load` does the linker's work: it copies
the sections into memory, writes the absolute addresses, and makes the memory executable. Objects that need anything
else are not saved; codecs do, because they call numba's run time. numba's own cache is used for those, on processors
other than x86-64, and where the folder cannot be written.

The folder is in ``NUMBA_CACHE_DIR`` or in the user's cache folder. Its name is a hash of everything that the code
depends on: the CPU, the versions of numba and LLVM, the sources of `bpsfast.kernels`, and numba's environment
variables. `load` accepts a file only if this user owns it, no other user can write it, and its checksum matches.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"bpsfast kernel 1\n"
_DIGEST_NBYTES = 32
_EM_X86_64 = 62
_R_X86_64_64 = 1
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS = 1, 2, 4, 8
_SHF_WRITE, _SHF_ALLOC = 1, 2
_SHN_UNDEF, _SHN_COMMON = 0, 0xFFF2
#: The lines of /proc/cpuinfo that identify the CPU model and its instruction sets.
_CPU_LINES = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_PROT_READ_EXEC = 1 | 4


class UnusableObjectError(ValueError):
    """An object needs more than `load` does."""


class LoadedKernel:
    """Machine code in memory; *address* is where its function begins. It lives as long as this."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory, self.address = memory, address


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    nbytes: int
    link: int
    info: int
    alignment: int
    entry_nbytes: int


def is_usable() -> bool:
    """Return whether kernels can be saved here."""
    return _folder() is not None


def load(key: Iterable[str]) -> LoadedKernel | None:
    """Return the kernel that was saved as *key*, or None if there is none that can be used."""
    folder = _folder()
    if folder is None:
        return None
    try:
        with open(folder / _name(key), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            data = file.read()
        return _linked(*_unpacked(data))
    except (OSError, ValueError, struct.error, LookupError):
        return None


def save(key: Iterable[str], compiled: Any) -> bool:
    """Save the object of numba's cfunc *compiled* as *key*; return whether `load` will find it."""
    folder = _folder()
    if folder is None:
        return False
    try:  # AttributeError, RuntimeError: another version of numba
        symbol, data = str(compiled.native_name), bytes(compiled._library._get_compiled_object())
        _linked(symbol, data)  # raises if it could not be loaded
        content = symbol.encode() + b"\0" + data
        path = folder / _name(key)
        fresh = path.with_suffix(f".{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, ValueError, struct.error, LookupError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def _name(key: Iterable[str]) -> str:
    return "-".join(key).replace("/", "_").replace(" ", "_") + ".kernel"


@functools.cache
def _folder() -> Path | None:
    """Return the folder of this machine's kernels, or None if there can be none."""
    if platform.machine() != "x86_64":
        return None
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parent = Path(chosen) / "bpsfast-kernels" if chosen else Path(cache) / "bpsfast" / "kernels"
    if not parent.is_absolute():  # without HOME, and for a user id without an entry
        return None
    try:
        folder = parent / _fingerprint()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ImportError):  # ImportError: a package, or Python itself, cannot be read
        return None
    return folder if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def _fingerprint() -> str:
    """Return a hash of all that the machine code of a kernel depends on."""
    digest = hashlib.sha256(_MAGIC)
    for package in ("numba", "llvmlite"):
        digest.update(_version_of(package) + b"\0")
    for name in sorted(name for name in os.environ if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR"):
        digest.update(f"{name}={os.environ[name]}\0".encode())
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in iter(file.readline, "\n"):  # up to the second CPU
            if not line:
                break
            if line.split("\t")[0].strip() in _CPU_LINES:
                digest.update(line.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version_of(package: str) -> bytes:
    """Return what identifies the version of *package*: a module that has it, which is not imported, else the number."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ImportError(f"{package} is not installed")
    try:
        return Path(found.origin).with_name("_version.py").read_bytes()
    except FileNotFoundError:
        from importlib.metadata import version  # takes 10 ms to import

        return version(package).encode()


def _unpacked(data: bytes) -> tuple[str, bytes]:
    """Return the symbol and the object in a file of ours; raise `ValueError` if it is damaged."""
    begin = len(_MAGIC) + _DIGEST_NBYTES
    if not data.startswith(_MAGIC) or hashlib.sha256(data[begin:]).digest() != data[len(_MAGIC):begin]:
        raise ValueError("no kernel, or a damaged one")
    symbol, _, content = data[begin:].partition(b"\0")
    return symbol.decode(), content


def _linked(symbol: str, data: bytes) -> LoadedKernel:
    """Put an ELF object into executable memory; raise `UnusableObjectError` if it needs another linker, `OSError` if
    memory must not become executable.
    """
    if data[:7] != b"\x7fELF\x02\x01\x01" or struct.unpack_from("<HH", data, 16) != (1, _EM_X86_64):
        raise UnusableObjectError("no ELF object of x86-64")
    offset, = struct.unpack_from("<Q", data, 40)
    n_sections, = struct.unpack_from("<H", data, 60)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * i)) for i in range(n_sections)]
    places: dict[int, int] = {}
    nbytes = 0
    for i, section in enumerate(sections):
        if section.flags & _SHF_ALLOC and section.nbytes:
            if section.flags & _SHF_WRITE or section.kind not in (_SHT_PROGBITS, _SHT_NOBITS):
                raise UnusableObjectError("a section that is written, or of an unknown kind")
            nbytes = -(-nbytes // max(section.alignment, 1)) * max(section.alignment, 1)
            places[i] = nbytes
            nbytes += section.nbytes
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for i, place in places.items():
        if sections[i].kind == _SHT_PROGBITS:
            memory[place:place + sections[i].nbytes] = data[sections[i].offset:sections[i].offset + sections[i].nbytes]
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    symbols = _Symbols(data, sections, {i: base + place for i, place in places.items()})
    for section in sections:
        if section.kind == _SHT_RELA and section.info in places:
            for at in range(section.offset, section.offset + section.nbytes, 24):
                where, info, addend = struct.unpack_from("<QQq", data, at)
                if info & 0xFFFFFFFF != _R_X86_64_64 or where + 8 > sections[section.info].nbytes:
                    raise UnusableObjectError(f"relocation {info & 0xFFFFFFFF}")
                value = symbols.address(info >> 32) + addend
                struct.pack_into("<Q", memory, places[section.info] + where, value & 0xFFFFFFFFFFFFFFFF)
    found = symbols.named(symbol)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(max(nbytes, 1)), _PROT_READ_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return LoadedKernel(memory, found)


class _Symbols:
    """The symbols of an object whose sections lie at *addresses*."""

    def __init__(self, data: bytes, sections: list[_Section], addresses: dict[int, int]) -> None:
        table = next((section for section in sections if section.kind == _SHT_SYMTAB), None)
        if table is None:
            raise UnusableObjectError("no table of symbols")
        self._data, self._addresses, self._table = data, addresses, table
        self._names = sections[table.link]
        self._process = ctypes.CDLL(None)

    def address(self, number: int) -> int:
        name, _, section, value = self._entry(number)
        if section in self._addresses:
            return self._addresses[section] + value
        if section != _SHN_UNDEF or not name:
            raise UnusableObjectError(f"symbol {name!r} is in section {section}")
        try:  # of libc, or of libm
            return ctypes.cast(getattr(self._process, name), ctypes.c_void_p).value or 0
        except AttributeError:
            raise UnusableObjectError(f"symbol {name!r} is in no library") from None

    def named(self, wanted: str) -> int:
        for number in range(self._table.nbytes // 24):
            if self._entry(number)[0] == wanted:
                return self.address(number)
        raise UnusableObjectError(f"no symbol {wanted!r}")

    def _entry(self, number: int) -> tuple[str, int, int, int]:
        """Return name, type, section and value of a symbol."""
        if not 0 <= number < self._table.nbytes // 24:
            raise UnusableObjectError(f"symbol {number}")
        name, info, _, section, value = struct.unpack_from("<IBBHQ", self._data, self._table.offset + 24 * number)
        begin = self._names.offset + name
        return self._data[begin:self._data.index(b"\0", begin)].decode(), info & 15, section, value
