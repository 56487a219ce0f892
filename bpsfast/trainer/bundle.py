"""Sums the tensors that TensorFlow, JAX or Keras pass in one call, given by host addresses of inputs and results.

Ranks of one machine sum them by themselves, one unit after another. Others are pushed to the node, all of them before
the first is waited for.
"""
from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from ..base.dtypes import TABLE
from ..orchestration.codec import CodecSpec
from ..orchestration.errors import BpsError
from ..orchestration.messages import TensorSpec
from ..pyx.port import copy
from .session import Session
from .unit import Unit

#: From this size on targets get huge pages, as in NumPy's allocator.
_LARGE_NBYTES = 4 << 20
_PAGE_NBYTES = 4096
_MADV_HUGEPAGE = 14

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Member(NamedTuple):
    """One tensor: its number in the bundle, and where it lies in its unit."""

    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Leaf:
    """One tensor of a bundle: its name in the job, shape, dtype and codec."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: CodecSpec | None = None

    @property
    def is_differentiable(self) -> bool:
        """Whether it has gradients."""
        return "float" in self.dtype


def specs_of(leaves: Sequence[Leaf], average: bool, priorities: Sequence[int | None]) -> list[TensorSpec]:
    """Return the declarations of a bundle: small tensors without a codec are fused."""
    fusible = [leaf.name for leaf in leaves if leaf.codec is None]
    group = f"{fusible[0]} to {fusible[-1]}, {len(fusible)} leaves" if len(fusible) > 1 else None
    return [TensorSpec(name=leaf.name, shape=leaf.shape, dtype=leaf.dtype, average=average, priority=priority,
                       codec=leaf.codec, group=None if leaf.codec is not None else group)
            for leaf, priority in zip(leaves, priorities)]


class Bundle:
    """The tensors *specs* in *session*. Any thread, one at a time.

    The first run waits until all ranks have declared them: all ranks must run their bundles in the same order.
    """

    def __init__(self, session: Session, specs: Sequence[TensorSpec]) -> None:
        self.session = session
        sizes = [prod(spec.shape) * TABLE[spec.dtype].itemsize for spec in specs]
        #: Tensors without bytes are neither declared nor sent.
        self._specs = [(number, spec, nbytes) for number, (spec, nbytes) in enumerate(zip(specs, sizes)) if nbytes]
        self._units: dict[Unit, list[_Member]] = {}
        self._together: dict[Unit, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}  # what is summed directly as one
        self._lock = threading.Lock()

    def run(self, sources: Sequence[int], targets: Sequence[int], learning_rate: float | None = None) -> None:
        """Sum what lies at the addresses *sources* into *targets*. *learning_rate*: see `bpsfast.push_pull`.

        Raises `MismatchError`, `BusyError`, `ClosedError`, `StallError` or `PeerLostError` as `bpsfast.push_pull`;
        *targets* are then partly written.
        """
        timeout_s = self.session.settings.timeout_s
        with self._lock:
            units = self._units or self._committed()
            begun: list[tuple[Unit, int]] = []
            try:
                direct = [unit for unit in units if unit.direct is not None]
                for unit, members in units.items():
                    if unit.direct is not None:
                        continue
                    if learning_rate is not None and unit.codec is not None:
                        unit.learning_rate = learning_rate
                    begun.append((unit, _push(unit, members, sources)))
                for unit in direct:
                    if not self._sum_directly(unit, sources, targets):
                        begun.append((unit, _push(unit, units[unit], sources)))
                deadline = time.monotonic() + timeout_s
                for unit, round in begun:
                    _deliver(unit, round, units[unit], targets, deadline)
            except BpsError as exc:
                for unit, _ in begun:
                    if unit.in_flight:
                        unit.give_up(exc)
                raise

    def _committed(self) -> dict[Unit, list[_Member]]:
        tensors, may_be_direct = self.session.tensors, self.session.sums_directly
        tensors.declare([msgspec.structs.replace(spec, direct=may_be_direct and spec.codec is None)
                         for _, spec, _ in self._specs])
        found: dict[Unit, list[_Member]] = {}
        for number, spec, nbytes in self._specs:
            unit = tensors.unit(spec.name)
            found.setdefault(unit, []).append(_Member(number, unit.members[spec.name].offset, nbytes))
        self._units = found
        return found

    def _sum_directly(self, unit: Unit, sources: Sequence[int], targets: Sequence[int]) -> bool:
        """Sum the tensors of *unit* without the node; return False, and do nothing, where that is not possible."""
        members = self._units[unit]
        if len(members) == 1:
            number, _, nbytes = members[0]
            _ask_for_huge_pages(targets[number], nbytes)
            return unit.sum_directly(sources[number], targets[number], nbytes)
        together = self._together.get(unit)
        if together is None:
            together = self._together[unit] = np.zeros(unit.nbytes, np.uint8)
        base = together.ctypes.data
        for number, offset, nbytes in members:
            copy(base + offset, sources[number], nbytes)
        if not unit.sum_directly(base, base, unit.nbytes):
            return False
        for number, offset, nbytes in members:
            copy(targets[number], base + offset, nbytes)
        return True


def _push(unit: Unit, members: Sequence[_Member], sources: Sequence[int]) -> int:
    """Push the tensors of *unit*, copied together if there are several; return the round."""
    if len(members) == 1:
        return unit.push(sources[members[0].number], members[0].nbytes)
    base = unit.staging.address
    for number, offset, nbytes in members:
        copy(base + offset, sources[number], nbytes)
    return unit.push()


def _deliver(unit: Unit, round: int, members: Sequence[_Member], targets: Sequence[int], deadline: float) -> None:
    """Copy the sums to *targets*; a single tensor partition by partition, as they complete."""
    left_s = max(0.0, deadline - time.monotonic())
    if len(members) == 1:
        _ask_for_huge_pages(targets[members[0].number], members[0].nbytes)
        unit.deliver(round, targets[members[0].number], 0, members[0].nbytes, left_s)
    unit.wait(round, left_s)
    if len(members) > 1:
        base = unit.view(round).ctypes.data
        for number, offset, nbytes in members:
            copy(targets[number], base + offset, nbytes)


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for huge pages under fresh memory: XLA's own allocator takes a page fault for every 4 KB."""
    if nbytes >= _LARGE_NBYTES:
        begin = -(-address // _PAGE_NBYTES) * _PAGE_NBYTES
        _madvise(begin, (address + nbytes - begin) // _PAGE_NBYTES * _PAGE_NBYTES, _MADV_HUGEPAGE)
