"""What is installed on this machine and works, for ``bpsfast info`` and ``bpsfast report``.

Packages are found by their metadata and never imported, as broken ones could crash; our compiled modules are loaded,
and shared memory is tried. Nothing is measured.
"""
from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import socket
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from .._version import __version__
from ..hardware import numa
from ..orchestration.errors import ConfigError
from .doctor import examination
from .doctor.facts import Facts

#: Instructions that sums, copies or encryption use; names as in /proc/cpuinfo.
_SIMD = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "aes",
         "vaes", "asimd", "fphp", "asimdhp", "sve", "bf16")
_MODULES = ("pages", "ring", "port", "direct", "engine", "dispatch", "pace", "tcp", "seal", "verbs", "rdma", "perf")
#: framework -> its distributions, our module for its tensors, and distributions that the module also needs
_FRAMEWORKS: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    ("torch", ("torch",), "bpsfast.torch", ()),
    ("jax", ("jax",), "bpsfast.jax", ("jaxlib", "optax")),
    ("tensorflow", ("tensorflow", "tensorflow-cpu"), "bpsfast.tensorflow", ()),
    ("keras", ("keras",), "bpsfast.keras", ()),
    ("mxnet", ("mxnet", "mxnet-cu112"), "bpsfast.mxnet", ()),
    ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"), "bpsfast.gpu.cuda", ()),
    ("lightning", ("lightning", "pytorch-lightning"), "bpsfast.torch.backend", ("torch",)),
    ("ray", ("ray",), "bpsfast.torch.backend", ("torch",)),
)
#: optional package -> its use
_PACKAGES = {
    "numpy": "arrays", "numba": "sums", "ml-dtypes": "bfloat16", "pyzmq": "control messages", "msgspec": "messages",
    "psutil": "processes", "click": "this command line", "optax": "bpsfast.jax's optimizers",
    "prometheus-client": "metrics_port, bpsfast top", "rich": "bpsfast top on a terminal",
    "nvidia-ml-py": "NVLinks and GPUs' names", "scipy": "bpsfast topo --strategy", "matplotlib": "pictures",
    "pyverbs": "verbs=pyverbs", "byteps": "not needed: bpsfast runs its programs",
    "horovod": "not needed: bpsfast.hvd runs its programs",
}


class Part(msgspec.Struct, frozen=True):
    """Something that works or does not. `found`: what it is, with its version; `reason`: why it does not work."""

    name: str
    works: bool
    found: str = ""
    reason: str = ""


class Limits(msgspec.Struct, frozen=True):
    """Limits of this process, in bytes and counts; None is unlimited or unknown."""

    memlock_bytes: int | None
    memlock_hard_bytes: int | None
    may_lock_all: bool
    n_files: int | None
    n_files_hard: int | None
    shm_bytes: int | None
    max_map_count: int | None


class Machine(msgspec.Struct, frozen=True):
    """This machine. The process may use `n_cpus_allowed` of `n_cpus`; `kernels_for` is numba's target."""

    system: str
    kernel: str
    architecture: str
    container: str
    cpu: str
    n_cpus: int
    n_cpus_allowed: int
    n_numa_nodes: int
    memory_bytes: int
    simd: tuple[str, ...]
    kernels_for: str


class Inventory(msgspec.Struct, frozen=True):
    """The inventory. `verbs` is libibverbs, `devices` are the RDMA devices that it opened."""

    version: str
    folder: str
    python: str
    interpreter: str
    machine: Machine
    modules: tuple[Part, ...]
    transports: tuple[Part, ...]
    verbs: Part
    devices: tuple[Part, ...]
    frameworks: tuple[Part, ...]
    packages: tuple[Part, ...]
    gpus: tuple[Part, ...]
    limits: Limits

    @property
    def is_whole(self) -> bool:
        """Whether all compiled modules load."""
        return all(part.works for part in self.modules)


def take(facts: Facts) -> Inventory:
    """Take the inventory; *facts* must be those of this machine, not of a recorded one."""
    return Inventory(
        version=__version__, folder=str(Path(__file__).parents[1]), python=platform.python_version(),
        interpreter=sys.executable, machine=_machine(facts), modules=tuple(map(_module, _MODULES)),
        transports=(_shm(facts), _tcp(facts), _rdma(facts), _encryption()), verbs=_verbs(facts),
        devices=_devices(facts),
        frameworks=tuple(_framework(*row) for row in _FRAMEWORKS),
        packages=tuple(Part(name, bool(installed(name)), installed(name), what) for name, what in _PACKAGES.items()),
        gpus=_gpus(facts), limits=_limits(facts))


def installed(name: str) -> str:
    """Return the version of the distribution *name*, "" if it is not installed. Imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _machine(facts: Facts) -> Machine:
    tree = facts.host.tree
    cpuinfo = tree.text("proc/cpuinfo") or ""
    model = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", cpuinfo, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.M)
    known = set(flags[1].split()) if flags else set()
    memory = re.search(r"^MemTotal:\s*(\d+) kB", tree.text("proc/meminfo") or "", re.M)
    release = re.search(r'^PRETTY_NAME="?([^"\n]+)', tree.text("etc/os-release") or "", re.M)
    return Machine(
        system=release[1] if release else platform.system(), kernel=facts.kernel_release,
        architecture=platform.machine(), container=facts.container, cpu=model[1] if model else "unknown",
        n_cpus=os.cpu_count() or 0, n_cpus_allowed=len(os.sched_getaffinity(0)),
        n_numa_nodes=max(1, len(numa.nodes(tree))), memory_bytes=int(memory[1]) * 1024 if memory else 0,
        simd=tuple(name for name in _SIMD if name in known), kernels_for=_kernels_for())


def _kernels_for() -> str:
    """Return the CPU that the summing kernels are compiled for."""
    try:
        from llvmlite.binding import get_host_cpu_name
    except (ImportError, OSError) as exc:
        return f"nothing: {exc}"
    return get_host_cpu_name()


def _module(name: str) -> Part:
    full = f"bpsfast.pyx.{name}"
    try:
        module = importlib.import_module(full)
    except (ImportError, OSError) as exc:
        return Part(full, False, "", f"{exc} (it may be compiled for another Python; reinstall bpsfast)")
    return Part(full, True, Path(module.__file__ or "").name)


def _shm(facts: Facts) -> Part:
    """Try what nodes and ranks of one machine need: a memfd and an abstract local socket."""
    try:
        os.close(os.memfd_create("bpsfast-info"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as local:
            local.bind(b"\0bpsfast-info-%d" % os.getpid())
    except OSError as exc:
        return Part("shm", False, "", f"{exc}: ranks cannot reach their node, so nothing works")
    return Part("shm", True, "memfd, abstract sockets",
                "" if facts.settings.allow_shm else "BPSFAST_ALLOW_SHM = 0: nodes of one host use tcp")


def _tcp(facts: Facts) -> Part:
    control = (facts.host.tree.text("proc/sys/net/ipv4/tcp_congestion_control") or "?").strip()
    return Part("tcp", True, f"{facts.settings.tcp_streams} streams to each peer, {control}", _unwanted(facts, "tcp"))


def _unwanted(facts: Facts, transport: str) -> str:
    """Return the setting that excludes *transport*, "" if none does."""
    return "" if facts.settings.transport in ("auto", transport) else f"BPSFAST_TRANSPORT = {facts.settings.transport}"


def _rdma(facts: Facts) -> Part:
    if not facts.host.devices:
        return Part("rdma", False, "", "no RDMA device (/sys/class/infiniband is empty); see bpsfast doctor")
    if not facts.capable:
        names = ", ".join(f"{device.name} ({device.driver})" for device in facts.host.devices)
        return Part("rdma", False, "", f"{names}: it lacks reliable connections; see bpsfast devices")
    blocks = examination.blocking(examination.examine(facts))
    if blocks:
        codes = ", ".join(f"{each.check.code} {each.check.title}" for each in blocks)
        return Part("rdma", False, "", f"{codes}; see bpsfast doctor")
    names = ", ".join(rail.name for rail in facts.choice.rails)
    return Part("rdma", bool(names), names,
                _unwanted(facts, "rdma") if names else "no port is active; see bpsfast devices")


def _encryption() -> Part:
    from ..base import encryption

    try:
        encryption.check_library()
    except (ConfigError, ImportError) as exc:
        return Part("encryption", False, "", str(exc))
    return Part("encryption", True, "OpenSSL's libcrypto, AES-256-GCM over tcp")


def _verbs(facts: Facts) -> Part:
    report = facts.verbs
    if report is None or report.error:
        return Part("libibverbs", False, "", report.error if report else "it was not queried")
    return Part("libibverbs", True, f"{report.version} (verbs={report.provider}), fork safety {report.fork}")


def _devices(facts: Facts) -> tuple[Part, ...]:
    parts = []
    for device in facts.host.devices:
        ports = ", ".join(f"port {port.number} {port.state}" for port in device.ports)
        opened = facts.opened.get(device.name)
        error = opened.error if opened else "libibverbs does not list it"
        parts.append(Part(device.name, not error, f"{device.driver}, {ports}", error))
    return tuple(parts)


def _framework(name: str, distributions: tuple[str, ...], module: str, needs: tuple[str, ...]) -> Part:
    found = next((f"{each} {version}" for each in distributions if (version := installed(each))), "")
    if not found:
        return Part(name, False, "", "not installed")
    found = found.removeprefix(f"{name} ")
    place = Path(__file__).parents[1].joinpath(*module.split(".")[1:])  # importing it might import the framework
    if not place.is_dir() and not place.with_suffix(".py").is_file():
        return Part(name, False, found, f"this version of bpsfast lacks {module}")
    missing = [each for each in needs if not installed(each)]
    if missing:
        return Part(name, False, found, f"{module} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return Part(name, True, f"{found} by {module}")


def _gpus(facts: Facts) -> tuple[Part, ...]:
    from ..hardware.topology import discovery
    from ..hardware.topology.graph import PartKind
    from ..hardware.topology.nvml import query_nvml

    answer = query_nvml()
    parts = tuple(Part(part.name, not answer.error, f"{part.model} {part.address}".strip(), answer.error)
                  for part in discovery.machine(facts.host, answer).of(PartKind.GPU))
    return parts or (Part("gpu", False, "", f"none found; NVML: {answer.error or 'lists none'}"),)


def _limits(facts: Facts) -> Limits:
    soft, hard = facts.memlock_nbytes
    files = [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(resource.RLIMIT_NOFILE)]
    return Limits(soft, hard, facts.can_lock_memory, files[0], files[1], facts.host.kernel.shm_nbytes(),
                  facts.host.tree.number("proc/sys/vm/max_map_count"))
