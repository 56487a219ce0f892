"""Allocates the node's memory for inputs, partials, slots and results, in segments that other processes may map.

    inputs     one arena per local rank: what the rank writes; mapped writable by the rank
    partials   sums of the local ranks, of parts that another node owns (several local ranks only)
    slots      where other nodes' partials land (tcp, rdma), of parts that this node owns
    results    both parities of every part that appears here: owned, or sent back to us (tcp, rdma)
    frames     of compressed results, both parities, of parts that this node owns
    states     of compressed parts, from round to round; private to this node
    stores     weights and momentum that this node keeps, of parts that it owns
    channels   where the ranks of this machine sum directly; mapped writable by all of them
    direct     memory of a rank's device: inputs and results that network cards read and write there

An arena is a list of segments, filled first fit. The memory of retired units is free again in its segment, which
exists until the job ends: processes that mapped or registered it need not be asked, and the next units need no new
one. Segment numbers are unique on the node over all kinds: (segment, offset) means the same to every process.

The kernel kills a process that faults in a memfd beyond a cgroup's limit, so the limits of the machine and of its
cgroups are checked before (`require_memory`). Page cache counts as free: the kernel drops it before it kills.
"""
from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ..base.free_list import FreeList
from ..hardware.affinity.binding import NumaMemory
from ..orchestration.errors import CapacityError
from ..pyx.pages import Segment, Shadow, pool_nbytes
from .transport.rdma import Rails

#: Partitions are cut at the largest page size in the job, and results lie at multiples of this machine's: so ranks can
#: map runs of them side by side.
PAGE_NBYTES = mmap.PAGESIZE
#: A new segment has at least this size, so that a thousand small tensors do not make a thousand descriptors.
MIN_SEGMENT_NBYTES = 2 << 20
#: Lane entries carry the segment number in 16 bits.
MAX_SEGMENTS = 1 << 16
#: Kinds of memory of which nothing is sent or received.
_UNSENT = ("state", "store", "channel")
#: Memory that is left to everything which is no segment: Python, sockets, the trainers' own allocations.
RESERVE_NBYTES = 64 << 20
#: cgroup v1 writes "no limit" as a huge number of pages.
_UNLIMITED = 1 << 60


class Place(NamedTuple):
    """A run of bytes: the number of its segment, its byte offset there, and its address in this process."""

    segment: int
    offset: int
    address: int

    def beyond(self, nbytes: int) -> Place:
        """Return the place *nbytes* further on."""
        return Place(self.segment, self.offset + nbytes, self.address + nbytes)


class Chunk:
    """One segment of an arena, and its free bytes; of a device's segment only the first *nbytes* are the arena's."""

    __slots__ = ("holes", "index", "segment")

    def __init__(self, index: int, segment: Segment | Shadow, nbytes: int = -1) -> None:
        self.index = index
        self.segment = segment
        self.holes = FreeList(segment.nbytes if nbytes < 0 else nbytes)


class Arena:
    """Memory of one kind. Made by `Regions.arena`; for the control loop's thread only."""

    def __init__(self, regions: Regions, kind: str, pool: bool, home: int | None) -> None:
        self.kind = kind
        self.home = home  # the NUMA node of new segments
        self.chunks: list[Chunk] = []
        self._regions = regions
        self.pool = pool  # may use huge pages of the pool

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(chunk.segment.nbytes for chunk in self.chunks)

    @property
    def free_nbytes(self) -> int:
        """Free bytes of its segments, in pieces of any size."""
        return sum(chunk.holes.nbytes for chunk in self.chunks)

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest free piece."""
        return max((chunk.holes.largest_nbytes for chunk in self.chunks), default=0)

    def allocate(self, nbytes: int, coming_nbytes: int = 0) -> tuple[Place, Chunk | None]:
        """Return *nbytes* of page-aligned memory, zero unless it was used before, and the chunk made for it, if any.

        *coming_nbytes* is what the caller is about to allocate, including this: a new segment is large enough for all.

        Raises `CapacityError` before any page is touched, if the machine cannot hold a new segment.
        """
        rounded = page_round(max(1, nbytes))
        for chunk in self.chunks:
            place = _take(chunk, rounded)
            if place is not None:
                return place, None
        chunk = self._regions.grow(self.kind, max(rounded, page_round(coming_nbytes), MIN_SEGMENT_NBYTES), self.pool,
                                   self.home)
        self.chunks.append(chunk)
        place = _take(chunk, rounded)
        assert place is not None, "the chunk was made for it"
        return place, chunk

    def release(self, place: Place, nbytes: int) -> None:
        """Free what `allocate` returned for *nbytes*: no process reads or writes there any more."""
        chunk = next(chunk for chunk in self.chunks if chunk.index == place.segment)
        chunk.holes.give(place.offset, page_round(max(1, nbytes)))

    def fit(self, nbytes: int) -> Place | None:
        """Do as `allocate`, but make no new segment; None if there is no room."""
        return next((place for chunk in self.chunks
                     if (place := _take(chunk, page_round(max(1, nbytes)))) is not None), None)


def _take(chunk: Chunk, rounded: int) -> Place | None:
    offset = chunk.holes.take(rounded)
    return None if offset is None else Place(chunk.index, offset, chunk.segment.address + offset)


class Regions:
    """All segments of one node; refuses what the machine cannot hold.

    *max_bytes*: upper bound of all segments together; 0: only the machine's limits count. *huge_pages*: try 2 MiB
    pages. Results do not use those of the pool: ranks map runs of results side by side at the granularity of ordinary
    pages. *homes*, *home*: makes segments on NUMA nodes, and the default NUMA node of all arenas.
    """

    def __init__(self, max_bytes: int = 0, huge_pages: bool = False, homes: NumaMemory | None = None,
                 home: int | None = None) -> None:
        self._homes = homes or NumaMemory({})
        self._home = home
        self._max_nbytes = max_bytes
        self._huge_pages = huge_pages
        self._chunks: list[Chunk] = []
        self._nbytes: dict[str, int] = {}
        self._arenas: list[Arena] = []
        self._kinds: list[str] = []
        self._registrar: Rails | None = None
        self._adopted: list[Segment] = []
        self.partials = self.arena("partial")
        self.slots = self.arena("slot")
        self.results = self.arena("result", pool=False)
        self.frames = self.arena("frame")
        self.states = self.arena("state")
        self.stores = self.arena("store")
        self.channels = self.arena("channel")
        self.direct = self.arena("direct")  # results in memory of a rank's device

    def arena(self, kind: str, pool: bool = True) -> Arena:
        """Return a new arena of *kind*; *pool*: its huge pages may be those of the pool."""
        made = Arena(self, kind, pool, self._home)
        self._arenas.append(made)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self._nbytes.values())

    @property
    def room_nbytes(self) -> int:
        """Bytes that new segments of slots and results may take, less their rounding; -1: not bounded."""
        if not self._max_nbytes:
            return -1
        return max(0, self._max_nbytes - self.nbytes - 2 * MIN_SEGMENT_NBYTES)

    def ownable_nbytes(self, n_writers: int) -> int:
        """Return how many more bytes of partitions, each with *n_writers* slots, this node can own; -1: any number."""
        if not self._max_nbytes:
            return -1
        by_new = self.room_nbytes // (n_writers + 2)
        left = [arena.largest_nbytes for arena in (self.slots, self.results)]
        return max(by_new, min(left[0] // n_writers if n_writers else left[1], left[1] // 2))

    def takeable_nbytes(self, n_writers: int, has_results: bool) -> int:
        """Return for about how many bytes of partitions, each with *n_writers* slots, there is memory now.

        *has_results*: there is memory for their results already, as where ranks push them.
        """
        room = free_memory_nbytes()
        if self._max_nbytes:
            room = min(room, self._max_nbytes - self.nbytes)
        by_new = max(0, room - 2 * MIN_SEGMENT_NBYTES) // max(1, n_writers + (0 if has_results else 2))
        left = self.slots.largest_nbytes // n_writers if n_writers else by_new
        return max(by_new, left if has_results else min(left, self.results.largest_nbytes // 2))

    @property
    def n_segments(self) -> int:
        """Number of segments ever made."""
        return len(self._chunks)

    def register_with(self, registrar: Rails) -> None:
        """Register all present and future segments with *registrar*; raises `CapacityError` as it does."""
        for chunk, kind in zip(self._chunks, self._kinds):
            if kind not in _UNSENT:
                registrar.register(kind, chunk.segment)
        self._registrar = registrar

    def add_device_memory(self, shadow: Shadow, result_nbytes: int) -> Chunk:
        """Register memory of a rank's device as part of `direct`; results may use its first *result_nbytes*.

        Raises `CapacityError` if a card refuses it; the caller still owns it then.
        """
        self._require_number()
        if self._registrar is not None:
            self._registrar.register("direct", shadow)
        chunk = Chunk(len(self._chunks), shadow, result_nbytes)
        self._chunks.append(chunk)
        self._kinds.append("direct")
        self.direct.chunks.append(chunk)
        return chunk

    def adopt(self, segment: Segment) -> None:
        """Take over the memory of a lost peer: this node and peers write there from now on; closed at the end."""
        self._adopted.append(segment)
        if self._registrar is not None:
            self._registrar.register("result", segment)

    def nbytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of segments per kind: input, partial, slot, result, frame, state, store, channel."""
        return dict(self._nbytes)

    def chunk(self, index: int) -> Chunk:
        """Return the chunk with segment number *index*."""
        return self._chunks[index]

    def require(self, wanted: Sequence[tuple[Arena, int]], purpose: str) -> None:
        """Return if *wanted*, tuples of (arena, nbytes), can be allocated together for *purpose*.

        Raises `CapacityError` with what is needed and what there is; nothing was allocated.
        """
        needed = ordinary = pooled = 0
        for arena, nbytes in wanted:
            # The free bytes may be in pieces that are too small: `grow` checks again in that case.
            free = arena.free_nbytes
            if nbytes > free:
                segment = max(nbytes - free, MIN_SEGMENT_NBYTES)
                needed += segment
                found = self._of_pool(segment, arena.pool, pooled)
                pooled += found
                ordinary += 0 if found else segment
        if needed:
            self._require(needed, ordinary, purpose)

    def grow(self, kind: str, nbytes: int, pool: bool, home: int | None = None) -> Chunk:
        """Make a segment of at least *nbytes*, faulted in; raises `CapacityError` before it touches a page."""
        self._require_number()
        try:
            segment = self._segment(kind, nbytes, pool, home)
        except OSError as exc:  # another process took the memory after the check
            free = min(limit.free_nbytes for limit in memory_limits())
            raise CapacityError(f"a segment of {nbytes} bytes for {kind}s could not be made, although {free} bytes "
                                f"are free: {exc}") from exc
        if self._registrar is not None and kind not in _UNSENT:
            try:
                self._registrar.register(kind, segment)
            except BaseException:
                segment.close()
                raise
        chunk = Chunk(len(self._chunks), segment)
        self._chunks.append(chunk)
        self._kinds.append(kind)
        self._nbytes[kind] = self._nbytes.get(kind, 0) + chunk.segment.nbytes
        return chunk

    def close(self) -> None:
        """Unmap everything. Only when engine, transports and registrar are closed.

        Raises `BufferError`: some memory is still exported; everything else is unmapped.
        """
        with contextlib.ExitStack() as last:
            for segment in (*(chunk.segment for chunk in self._chunks), *self._adopted):
                last.callback(segment.close)

    def _require_number(self) -> None:
        if len(self._chunks) >= MAX_SEGMENTS:
            raise CapacityError(f"a node can have {MAX_SEGMENTS} segments, this one has {len(self._chunks)}: "
                                "declare fewer, larger tensors (or groups)")

    def _of_pool(self, nbytes: int, pool: bool, taken_nbytes: int = 0) -> int:
        """Return the bytes of the pool of huge pages that a segment of *nbytes* takes; *taken_nbytes* are reserved."""
        return pool_nbytes(nbytes, taken_nbytes) if self._huge_pages and pool else 0

    def _segment(self, kind: str, nbytes: int, pool: bool, home: int | None) -> Segment:
        purpose, name = f"a segment for {kind}s", f"bpsfast-{kind}"
        if self._of_pool(nbytes, pool):
            self._require(nbytes, 0, purpose)
            with contextlib.suppress(OSError):  # another process took it meanwhile, or a cgroup limits it
                return self._homes.segment(home, nbytes, name=name, falls_back=False)
        self._require(nbytes, nbytes, purpose)
        return self._homes.segment(home, nbytes, name=name, huge=self._huge_pages, pool=False)

    def _require(self, nbytes: int, ordinary_nbytes: int, purpose: str) -> None:
        """Raise `CapacityError` unless there are *nbytes* more, *ordinary_nbytes* of them outside the huge page pool.

        Memory that the kernel has reserved for the pool does not count as available.
        """
        if self._max_nbytes and self.nbytes + nbytes > self._max_nbytes:
            raise CapacityError(
                f"{purpose} needs {nbytes} more bytes, but BPSFAST_MAX_BYTES={self._max_nbytes} leaves "
                f"{max(0, self._max_nbytes - self.nbytes)} (segments hold {self.nbytes}): raise it, or push less"
            )
        if ordinary_nbytes:
            require_memory(ordinary_nbytes, purpose)
        if self._registrar is not None:
            self._registrar.require(nbytes, purpose)


def page_round(nbytes: int) -> int:
    """Return *nbytes* rounded up to whole pages."""
    return (nbytes + PAGE_NBYTES - 1) // PAGE_NBYTES * PAGE_NBYTES


class MemoryLimit(NamedTuple):
    """One bound on memory: what sets it, how much it allows at all, and how much of that is still free (bytes)."""

    source: str
    nbytes: int
    free_nbytes: int


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return all bounds that hold for this process. *root* is where /proc and the cgroup mounts are looked up."""
    memory = psutil.virtual_memory()
    return [MemoryLimit("the machine", memory.total, memory.available), *_cgroup_limits(root)]


def free_memory_nbytes() -> int:
    """Return how many bytes this process may still take."""
    return max(0, min(limit.free_nbytes for limit in memory_limits()) - RESERVE_NBYTES)


def require_memory(nbytes: int, purpose: str, root: Path = Path("/")) -> None:
    """Return if *nbytes* more may be taken for *purpose*.

    Raises `CapacityError` naming the tightest bound, what is needed and what is free, both in bytes.
    """
    tightest = min(memory_limits(root), key=lambda limit: limit.free_nbytes)
    free = max(0, tightest.free_nbytes - RESERVE_NBYTES)
    if nbytes > free:
        raise CapacityError(
            f"{purpose} needs {nbytes} bytes ({nbytes / 2**20:.1f} MiB), but {tightest.source} has {free} bytes "
            f"({free / 2**20:.1f} MiB) free of {tightest.nbytes} (less {RESERVE_NBYTES} kept for everything else): "
            "raise the limit, or push less at a time"
        )


def _cgroup_limits(root: Path) -> list[MemoryLimit]:
    """Return the limits of the process's memory cgroup and of all its ancestors, v1 and v2."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in memberships:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            names = ("memory.max", "memory.current", "")
            where = _mount(mounts, "cgroup2", None)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            where = _mount(mounts, "cgroup", "memory")
        else:
            continue
        if where is not None:
            found += _ancestor_limits(root, where, path, names)
    return found


def _mount(mounts: list[str], kind: str, option: str | None) -> tuple[str, str] | None:
    """Return (root inside the hierarchy, mount point) of a cgroup file system, or None if it is not mounted."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and rest and rest[0] == kind and (option is None or option in rest[-1].split(",")):
            return fields[3], fields[4]
    return None


def _ancestor_limits(root: Path, where: tuple[str, str], path: str, names: tuple[str, str, str]) -> list[MemoryLimit]:
    inside, mount_point = where
    top = root / mount_point.lstrip("/")
    # In a container the hierarchy is mounted from our own group on: its root is not "/".
    relative = path.removeprefix(inside) if inside != "/" else path
    group = top / relative.strip("/")
    if not group.is_dir():
        group = top
    found = []
    for folder in (group, *group.parents):
        if folder != top and top not in folder.parents:
            break
        limit = _read_limit(folder, *names)
        if limit is not None:
            found.append(limit)
    return found


def _read_limit(folder: Path, limit_name: str, usage_name: str, prefix: str) -> MemoryLimit | None:
    try:
        text = (folder / limit_name).read_text().strip()
        used = int((folder / usage_name).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None  # the root group has no limit files, other groups may be hidden from us
    if text == "max" or int(text) >= _UNLIMITED:
        return None
    stat = dict(line.split() for line in lines)
    # Pages of memfds are on the anonymous lists, so these two are true cache.
    cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
    return MemoryLimit(f"cgroup {folder}", int(text), max(0, int(text) - used + cache))
