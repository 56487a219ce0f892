"""Binds threads to CPUs and segments to NUMA nodes, and reads which bindings a rank's environment asks for."""
from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.value_formats import format_cpus, parse_cpus
from ...orchestration.errors import ConfigError
from ...pyx import pages
from ...pyx.pages import Segment
from .. import numa

if TYPE_CHECKING:
    from ..host import Host


def device_cores(host: Host, device: str, text: str, allowed: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the CPUs for the thread of *device* by the setting rdma_cores: "3", "4-7", "numa" or "". Empty: any.

    "numa" gives none if the kernel does not report the device's NUMA node, or if this process may not run there.
    *allowed*: the CPUs of this process, if it is bound to fewer at present. Raises `ConfigError` if this process may
    run on none of the CPUs.
    """
    allowed = allowed or numa.allowed_cpus(host.tree)
    if text == "numa":
        beside = next((each.numa_node for each in host.devices if each.name == device), None)
        return host.numa[beside].cpus & allowed if beside in host.numa else frozenset()
    wanted = parse_cpus(text)
    if wanted and not wanted & allowed:
        raise ConfigError(f"rdma_cores={text}: this process may run on none of them, but on "
                          f"{','.join(map(str, sorted(allowed)))} (taskset, cpuset)")
    return wanted & allowed


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Bind the calling thread to *cores* in the block; threads that it starts there stay bound. Empty: no binding."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def for_each_thread(apply: Callable[[int], None]) -> None:
    """Call *apply* with the id of every thread of this process, including threads that start in the meantime."""
    done: set[int] = set()
    while fresh := {int(path.name) for path in Path("/proc/self/task").iterdir()} - done:
        for thread in fresh:
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                apply(thread)
        done |= fresh


_log = logging.getLogger("bpsfast.hardware.affinity")
_ADVICE = {
    errno.EPERM: "a container allows it with --cap-add SYS_NICE (docker's seccomp profile refuses it)",
    errno.ENOSYS: "this kernel cannot",
}
_warned: list[str] = []


def warn_refused(call: str, code: int, instead: str) -> None:
    """Warn once per process that *call* failed with the errno *code*; *instead*: the consequence. Thread-safe."""
    advice = _ADVICE.get(code, "see which CPUs and memory nodes the cpuset of this process has")
    text = (f"{call} was refused: {errno.errorcode.get(code, code)} ({os.strerror(code)}). {instead}. To have it: "
            f"{advice}; to do without: BPSFAST_NUMA=0")
    if _warned:
        _log.debug("%s", text)
    else:
        _warned.append(call)
        _log.warning("%s", text)


#: The CPUs of this process before each binding that is in effect; child processes get the first of them.
_before: list[frozenset[int]] = []


class ThreadBinding:
    """Binds all present and future threads of this process to *cpus*, as far as allowed, until `undo`. Empty: none.

    Threads that are already bound to other CPUs than the calling thread keep theirs. If the kernel refuses, threads
    stay as they are and a warning is logged. Not thread-safe.
    """

    def __init__(self, cpus: frozenset[int]) -> None:
        self._pid = os.getpid()
        before = frozenset(os.sched_getaffinity(0))
        self._before, self.cpus = before, frozenset[int]()
        wanted, call = cpus & before, f"sched_setaffinity(CPUs {format_cpus(cpus)})"
        if cpus and not wanted:
            warn_refused(call, errno.EINVAL, f"This process stays on CPUs {format_cpus(before)}")
        elif wanted and wanted != before:
            try:
                _move(before, wanted)
            except OSError as exc:
                warn_refused(call, exc.errno or 0, "Threads run anywhere")
            else:
                _before.append(before)
                self.cpus = wanted

    def undo(self) -> None:
        """Restore the CPUs from before. Idempotent; does nothing in a forked child."""
        if self.cpus and os.getpid() == self._pid:
            cpus, self.cpus = self.cpus, frozenset()
            _before.remove(self._before)
            try:
                _move(cpus, self._before)
            except OSError as exc:  # the cpuset has changed
                warn_refused(f"sched_setaffinity(CPUs {format_cpus(self._before)})", exc.errno or 0,
                             "Threads stay where they are")


def unbound_cpus() -> frozenset[int]:
    """Return the CPUs that this process could use before it was bound; empty if it is not bound."""
    return _before[0] if _before else frozenset()


def _move(begin: frozenset[int], end: frozenset[int]) -> None:
    """Bind to *end* the threads that are bound to *begin*."""
    for_each_thread(lambda thread: os.sched_setaffinity(thread, end) if os.sched_getaffinity(thread) == begin else None)


#: variable -> values with which an OpenMP library binds no threads; with others it binds them when it is loaded
_UNBOUND = {
    "OMP_PROC_BIND": ("false",),
    "OMP_PLACES": (),
    "GOMP_CPU_AFFINITY": (),
    "KMP_AFFINITY": ("none", "disabled"),
}
#: the first one that is set limits the devices of a process in CUDA and ROCm
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def binding_variable(environ: Mapping[str, str]) -> str:
    """Return the variable with which the user binds threads of this process, "" if there is none."""
    for variable, unbound in _UNBOUND.items():
        text = environ.get(variable, "").strip().lower()
        if text and not set(unbound) & set(text.split(",")):
            return variable
    return ""


def default_gpu(environ: Mapping[str, str], local_rank: int) -> int:
    """Return the number of the GPU that *local_rank* uses by default, -1 if unknown.

    Of several visible GPUs it is the one with the rank's number, else the only visible one.
    """
    for variable in _VISIBLE:
        if variable in environ:
            words = [word.strip() for word in environ[variable].split(",")]
            word = words[0] if len(words) == 1 else words[local_rank] if local_rank < len(words) else ""
            return int(word) if word.isascii() and word.isdecimal() and len(word) < 4 else -1  # GPU-UUID, MIG-UUID, -1
    return local_rank


class NumaMemory:
    """Makes segments on NUMA nodes. *cpus*: of each node, those that this process may run on. Thread-safe.

    mbind with MPOL_PREFERRED uses pages of other nodes if the node is full. If mbind is refused, the thread that makes
    a segment runs on the node meanwhile, so that the pages it touches first are there.
    """

    def __init__(self, cpus: Mapping[int, frozenset[int]]) -> None:
        self._cpus = cpus
        self._binds: dict[int, bool] = {}

    def segment(self, home: int | None, nbytes: int, **options: Any) -> Segment:
        """Return a new segment on NUMA node *home* (None: any); *options* and errors are `Segment`'s."""
        if home is None:
            return Segment(nbytes, **options)
        if self._is_bound(home):
            return Segment(nbytes, node=home, **options)
        cpus = self._cpus.get(home, frozenset())
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(on_cores(cpus))
            except OSError as exc:
                warn_refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", exc.errno or 0, "Memory is anywhere")
                self._cpus = {}
            return Segment(nbytes, **options)

    def _is_bound(self, home: int) -> bool:
        if home not in self._binds:
            code = pages.bind_errno(home)
            self._binds[home] = not code
            if code:
                warn_refused(f"mbind(MPOL_PREFERRED, node {home})", code, "Memory is placed by who touches it first")
        return self._binds[home]
