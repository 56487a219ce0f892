"""``bpsfast report``: collects and redacts the entries of a bug report, and writes an archive for its owner only."""
from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .._version import __version__
from ..orchestration.errors import BpsError, ConfigError
from .redaction import Leak, Redactor, is_secret_name

#: Most bytes of a file that the user names, from its end.
MOST_LOG_NBYTES = 1 << 20
_MOST_FILES = 64
#: Begin and end of a private key.
_KEY_MARK = re.compile(r"-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----")
#: Prefixes of variables that change a job; the report contains no other variable, not even its name.
_PREFIXES = ("BPSFAST_", "BYTEPS_", "DMLC_", "PS_", "NCCL_", "GLOO_", "UCX_", "FI_", "RDMAV_", "IBV_", "MLX5_", "MLX4_",
             "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMBA_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "JAX_",
             "XLA_", "CUDA_", "NVIDIA_", "HOROVOD_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MALLOC_")
_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH",
    "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "LANG", "TERM", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "KUBERNETES_SERVICE_HOST", "container"})
#: Kernel files about cards, limits and TCP, as globs below the root.
_KERNEL = (
    "proc/version", "proc/self/limits", "proc/self/cgroup", "proc/self/uid_map", "proc/sys/vm/max_map_count",
    "proc/sys/vm/overcommit_memory", "proc/sys/kernel/numa_balancing", "proc/sys/net/core/[rw]mem_*",
    "proc/sys/net/core/somaxconn", "proc/sys/net/ipv4/tcp_[rw]mem", "proc/sys/net/ipv4/tcp_congestion_control",
    "proc/sys/net/ipv4/tcp_available_congestion_control", "proc/sys/net/ipv4/ip_local_port_range", "proc/meminfo",
    "proc/modules", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/pids.max",
    "sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "sys/class/infiniband/*/*", "sys/class/infiniband/*/ports/*/*", "sys/class/infiniband/*/ports/*/counters/*",
    "sys/class/infiniband/*/ports/*/hw_counters/*", "sys/class/infiniband/*/device/numa_node",
    "sys/class/infiniband/*/device/*link_*", "sys/class/net/*/mtu", "sys/class/net/*/operstate",
    "sys/class/net/*/speed", "sys/class/net/*/address", "sys/class/net/*/device/numa_node",
    "sys/class/net/*/device/*link_*", "sys/class/net/*/statistics/*_errors", "sys/class/net/*/statistics/*_dropped",
    "sys/devices/system/node/node*/cpulist", "sys/devices/system/cpu/smt/active")
_MOST_KERNEL_NBYTES = 64 << 10
_COMMAND_S = 60.0


class Entry(NamedTuple):
    """One file of the report: name, description, function for its text or JSON data, whether 1.2.3.4 is a version."""

    name: str
    about: str
    get: Callable[[], Any]
    has_versions: bool = False


class Omission(NamedTuple):
    """A file that the user named but that is not in the report, and why."""

    name: str
    reason: str


def entries(environ: Mapping[str, str], files: Sequence[Path], n_lines: int) -> Iterator[Entry]:
    """Yield the entries of the report; nothing is read before its entry is opened."""
    yield Entry("info.json", "what is installed and works: bpsfast info", lambda: _command("info"), True)
    yield Entry("settings.json", "every setting and its origin: bpsfast info --effective",
                lambda: _command("info", "--effective"))
    yield Entry("doctor.json", "why RDMA does not work: bpsfast doctor", lambda: _command("doctor"))
    yield Entry("devices.json", "RDMA devices and cards: bpsfast devices", lambda: _command("devices"))
    yield Entry("gids.json", "the GID table: bpsfast gids", lambda: _command("gids"))
    yield Entry("topo.json", "the topology of the machine: bpsfast topo", lambda: _command("topo"))
    yield Entry("packages.txt", "every Python package and its version, as pip list", packages, True)
    yield Entry("environment.txt", "environment variables that change a job", lambda: variables(environ))
    yield Entry("kernel.txt", "limits, memory, TCP and network cards, from /proc and /sys", lambda: kernel(Path("/")))
    for number, path in enumerate(files, 1):
        yield Entry(f"logs/{number:02}-{path.name}", f"the last {n_lines} lines of {path}",
                    lambda path=path: last_lines(path, n_lines))  # type: ignore[misc]


def named(paths: Sequence[Path]) -> tuple[list[Path], list[Omission]]:
    """Return the files in *paths* (of folders: all files, newest first), and those left out."""
    files: list[Path] = []
    left_out: list[Omission] = []
    for path in paths:
        found = sorted((each for each in path.rglob("*") if each.is_file()), key=lambda each: -each.stat().st_mtime
                       ) if path.is_dir() else [path]
        if len(found) > _MOST_FILES:
            left_out.append(Omission(str(path), f"{len(found) - _MOST_FILES} of its files, the oldest"))
        for each in found[:_MOST_FILES]:
            try:
                with each.open("rb") as file:
                    reason = "it holds no text" if b"\0" in file.read(8192) else ""
            except OSError as exc:
                reason = exc.strerror or str(exc)
            if reason:
                left_out.append(Omission(str(each), reason))
            else:
                files.append(each)
    return files, left_out


def read(entry: Entry) -> tuple[Any, str]:
    """Return the content of *entry*, and "" or why it could not be read; the report goes on without it."""
    try:
        return entry.get(), ""
    except (BpsError, OSError, ValueError, subprocess.SubprocessError) as exc:
        return None, f"{type(exc).__name__}: {exc}"


def packages() -> str:
    """Return ``name==version`` of every distribution."""
    names = {f"{found.metadata['Name']}=={found.version}" for found in metadata.distributions()
             if found.metadata["Name"]}
    return "\n".join(sorted(names, key=str.lower)) + "\n"


def variables(environ: Mapping[str, str]) -> str:
    """Return ``NAME=value`` of variables that change a job; secrets show only that they are set."""
    return "".join(f"{name}={'(set)' if is_secret_name(name) else value}\n" for name, value in sorted(environ.items())
                   if name.startswith(_PREFIXES) or name in _VARIABLES)


def kernel(root: Path) -> str:
    """Return the kernel files as blocks, without those that cannot be read (an empty row of a table gives EINVAL)."""
    blocks = []
    for pattern in _KERNEL:
        for name in sorted(glob.glob(os.path.join(root, pattern))):
            path = Path(name)
            if not path.is_file():
                continue
            try:
                with path.open("rb") as file:
                    text = file.read(_MOST_KERNEL_NBYTES).decode("utf-8", "replace").strip()
            except OSError:
                continue
            shown = f"/{path.relative_to(root)}"
            blocks.append(f"{shown}: {text}" if "\n" not in text else f"{shown}:\n{text}\n")
    return "\n".join(blocks) + "\n"


def last_lines(path: Path, n_lines: int) -> str:
    """Return the end of a file, from the start of a line on, and after a private key that starts before it."""
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END) - MOST_LOG_NBYTES
        file.seek(max(0, begin - 1))
        if begin > 0:
            file.readline()  # half a secret cannot be recognized
        lines = file.read().decode("utf-8", "replace").splitlines(keepends=True)
    text = "".join(lines[-n_lines:])
    key = _KEY_MARK.search(text)
    return f"(the rest of a private key)\n{text[key.end():].lstrip()}" if key and key[1] == "END" else text


def _command(*arguments: str) -> Any:
    """Return the JSON of one of our commands, run in a process of its own because a driver library may crash it."""
    done = subprocess.run([sys.executable, "-m", "bpsfast", *arguments, "--json"], capture_output=True,
                          timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONSAFEPATH": "1"})
    return msgspec.json.decode(done.stdout)

_ROOT = "bpsfast-report"
_N_THREADS = 4
_README = f"""A report of bpsfast {__version__}, made by `bpsfast report` on its user's machine.

Secrets are replaced by (hidden); users, hosts, addresses and cards by user-1, host-1, 10.0.1.1, fd00:0:0:1::1 and
02:00:00:00:00:01: each by the same placeholder everywhere, addresses of one network by addresses of one network.

"""


class File(msgspec.Struct, frozen=True):
    """One file of the archive."""

    name: str
    about: str
    content: bytes
    n_lines: int


def gather(entries: Iterable[Entry], scrubber: Redactor) -> tuple[list[File], list[Omission]]:
    """Return the redacted files, and the entries that could not be read or still held a secret."""
    files: list[File] = []
    left_out: list[Omission] = []
    chosen = list(entries)
    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="bpsfast-report") as executor:
        for entry, (found, reason) in zip(chosen, executor.map(read, chosen)):
            try:
                name, about = scrubber.text(entry.name), scrubber.text(entry.about)
                if reason:
                    left_out.append(Omission(name, scrubber.text(reason)))
                    continue
                shown = scrubber.text(found, not entry.has_versions) if isinstance(found, str) else json.dumps(
                    scrubber.data(found, not entry.has_versions), indent=1, ensure_ascii=False) + "\n"
                scrubber.check(shown)
            except Leak as exc:
                left_out.append(Omission(f"entry {len(files) + len(left_out) + 1}", str(exc)))
                continue
            files.append(File(name, about, shown.encode("utf-8", "replace"), shown.count("\n")))
    return files, left_out


def readme(files: Sequence[File], left_out: Sequence[Omission]) -> File:
    """Return the README of the archive."""
    lines = [f"{file.name:<24} {file.about}" for file in files]
    lines += [f"{each.name:<24} not here: {each.reason}" for each in left_out]
    content = _README + "\n".join(lines) + "\n"
    return File("README.txt", "what is what", content.encode(), content.count("\n"))


def write(path: Path, files: Sequence[File]) -> int:
    """Write the archive, readable by this user only; return its size in bytes. Never overwrites a file.

    Raises `ConfigError` if the file exists or cannot be created, `OSError` if there is no space or no permission.
    No partial file is left.
    """
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as zipped, tarfile.open(
            fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            entry = tarfile.TarInfo(f"{_ROOT}/{file.name}")
            entry.size, entry.mode = len(file.content), 0o600
            archive.addfile(entry, io.BytesIO(file.content))
    try:
        out = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError as exc:
        raise ConfigError(f"{path}: the file exists; name another one with -o, or remove it") from exc
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigError(f"{path}: the folder does not exist") from exc
    try:
        with out:
            out.write(packed.getvalue())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return len(packed.getvalue())
