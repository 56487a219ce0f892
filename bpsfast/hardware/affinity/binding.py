"""Threads of this process kept to CPUs, and let go again. Never to CPUs that it might not run on before."""
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
    """Return the cores for *device* by the setting's *text*: "3", "4-7", "numa" or "". Empty: any.

    "numa" is empty, too, where the kernel does not say which NUMA node the device is on, and where this process may
    run on none of its cores. *allowed*: where it may run, if it now keeps to less by itself.

    Raises
    ------
    ConfigError
        If this process may run on none of them.
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
    """Keep the calling thread on *cores* meanwhile, and every thread that it starts meanwhile for good; empty: any."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def for_each_thread(apply: Callable[[int], None]) -> None:
    """Call *apply* with the id of every thread of this process, those that are born meanwhile included."""
    done: set[int] = set()
    while fresh := {int(path.name) for path in Path("/proc/self/task").iterdir()} - done:
        for thread in fresh:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                apply(thread)
        done |= fresh


_log = logging.getLogger("bpsfast.hardware.affinity")
_ADVICE = {
    errno.EPERM: "a container allows it with --cap-add SYS_NICE (docker's seccomp profile refuses it)",
    errno.ENOSYS: "this kernel cannot",
}
_told: list[str] = []


def warn_refused(call: str, code: int, instead: str) -> None:
    """Say that *call* was refused with the errno *code*, and what is done *instead*. Said once; any thread."""
    advice = _ADVICE.get(code, "see which CPUs and memory nodes the cpuset of this process has")
    text = (f"{call} was refused: {errno.errorcode.get(code, code)} ({os.strerror(code)}). {instead}. To have it: "
            f"{advice}; to do without: BPSFAST_NUMA=0")
    if _told:
        _log.debug("%s", text)
    else:
        _told.append(call)
        _log.warning("%s", text)


#: CPUs of this process before it was first pinned, and not let go since: what it starts is not to inherit its seat.
_before: list[frozenset[int]] = []


class ThreadBinding:
    """All threads of this process on *cpus*, those to come included, until `undo`; none: nothing is done.

    A thread that is kept to less than the calling one, by whomever, is left there. Where the kernel refuses, threads
    stay where they are, and a warning says so. Not thread-safe.
    """

    def __init__(self, cpus: frozenset[int]) -> None:
        self._pid = os.getpid()
        before = frozenset(os.sched_getaffinity(0))
        self._before, self.cpus = before, cpus & before
        if not self.cpus or self.cpus == before:
            if cpus and not self.cpus:
                warn_refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", errno.EINVAL,
                        f"This process stays on CPUs {format_cpus(before)}")
            self.cpus = frozenset()
            return
        try:
            _move(before, self.cpus)
        except OSError as exc:
            warn_refused(f"sched_setaffinity(CPUs {format_cpus(cpus)})", exc.errno or 0, "Threads run anywhere")
            self.cpus = frozenset()
            return
        _before.append(before)

    def undo(self) -> None:
        """Let the threads run where they might before. Idempotent; does nothing in a fork."""
        if self.cpus and os.getpid() == self._pid:
            cpus, self.cpus = self.cpus, frozenset()
            _before.remove(self._before)
            try:
                _move(cpus, self._before)
            except OSError as exc:  # the cpuset has changed
                warn_refused(f"sched_setaffinity(CPUs {format_cpus(self._before)})", exc.errno or 0,
                        "Threads stay where they are")


def unbound_cpus() -> frozenset[int]:
    """Return the CPUs that this process might run on before it was pinned; none if it is not."""
    return _before[0] if _before else frozenset()


def _move(begin: frozenset[int], end: frozenset[int]) -> None:
    """Keep to *end* the threads that are kept to *begin*."""
    for_each_thread(lambda thread: os.sched_setaffinity(thread, end) if os.sched_getaffinity(thread) == begin else None)


#: variable -> values by which an OpenMP library binds no thread; any other makes it bind them to places that it has
#: found when it was loaded, and that are not those of a plan made later
_UNBOUND = {
    "OMP_PROC_BIND": ("false",),
    "OMP_PLACES": (),
    "GOMP_CPU_AFFINITY": (),
    "KMP_AFFINITY": ("none", "disabled"),
}
#: the first that is set says which devices a process sees, as CUDA and ROCm read them
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def binding_variable(environ: Mapping[str, str]) -> str:
    """Return the variable by which the user has threads of this process bound, "" if there is none."""
    for variable, unbound in _UNBOUND.items():
        text = environ.get(variable, "").strip().lower()
        if text and not set(unbound) & set(text.split(",")):
            return variable
    return ""


def default_gpu(environ: Mapping[str, str], local_rank: int) -> int:
    """Return the number of the GPU that local rank *local_rank* uses by custom; -1: none, or nobody knows.

    Of several that it sees the one with its own number; the only one, if it sees one.
    """
    for variable in _VISIBLE:
        if variable in environ:
            words = [word.strip() for word in environ[variable].split(",")]
            word = words[0] if len(words) == 1 else words[local_rank] if local_rank < len(words) else ""
            return int(word) if word.isascii() and word.isdecimal() and len(word) < 4 else -1  # GPU-UUID, MIG-UUID, -1
    return local_rank


class NumaMemory:
    """Makes segments. *cpus*: of each NUMA node, those that this process may run on. Any thread.

    mbind's MPOL_PREFERRED gives pages of another node where the home is full. Where it is refused, the thread that
    makes a segment runs at the home meanwhile, so that the pages it faults in are there: only the policy is lost.
    """

    def __init__(self, cpus: Mapping[int, frozenset[int]]) -> None:
        self._cpus = cpus
        self._binds: dict[int, bool] = {}

    def segment(self, home: int | None, nbytes: int, **options: Any) -> Segment:
        """Return a new segment on node *home* (None: anywhere); *options* and errors are `Segment`'s."""
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
