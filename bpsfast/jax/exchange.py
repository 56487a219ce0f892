"""The tensors of one push_pull, summed from memory to memory: all are begun before the first is waited for."""
from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from math import prod

from ..dtypes import TABLE
from ..orchestration.errors import BpsError
from ..orchestration.messages import TensorSpec
from ..trainer.session import Session
from ..trainer.unit import Unit

#: From this size on targets are worth a system call, as in NumPy's allocator.
_LARGE_NBYTES = 4 << 20
_PAGE_NBYTES = 4096
_MADV_HUGEPAGE = 14

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Exchange:
    """The tensors *specs* in *session*. Any thread, one at a time.

    The first run waits until all ranks have declared them. That cannot deadlock: every rank comes to its push_pulls of
    JAX in one order (see `primitive`).
    """

    def __init__(self, session: Session, specs: Sequence[TensorSpec]) -> None:
        self.session = session
        sizes = [prod(spec.shape) * TABLE[spec.dtype].itemsize for spec in specs]
        #: Place among the leaves, description, and bytes; what has no bytes is neither declared nor sent.
        self._members = [(i, spec, nbytes) for i, (spec, nbytes) in enumerate(zip(specs, sizes)) if nbytes]
        self._units: list[tuple[int, Unit, int]] | None = None
        self._lock = threading.Lock()

    def run(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Sum what lies at the addresses *sources* into *targets*.

        Raises
        ------
        MismatchError, BusyError, ClosedError, StallError, PeerLostError
            As `bpsfast.push_pull`; *targets* are then partly written.
        """
        timeout_s = self.session.settings.timeout_s
        with self._lock:
            units = self._units or self._committed()
            begun: list[tuple[Unit, int]] = []
            try:
                for place, unit, nbytes in units:
                    begun.append((unit, unit.push(sources[place], nbytes)))
                deadline = time.monotonic() + timeout_s
                for place, _, nbytes in units:
                    _ask_for_huge_pages(targets[place], nbytes)
                for (unit, round), (place, _, nbytes) in zip(begun, units):
                    left_s = max(0.0, deadline - time.monotonic())
                    unit.deliver(round, targets[place], 0, nbytes, left_s)
                    unit.wait(round, left_s)
            except BpsError as exc:
                for unit, _ in begun:
                    if unit.in_flight:
                        unit.give_up(exc)
                raise

    def _committed(self) -> list[tuple[int, Unit, int]]:
        session = self.session
        session.tensors.declare([spec for _, spec, _ in self._members])
        self._units = [(place, session.tensors.unit(spec.name), nbytes) for place, spec, nbytes in self._members]
        return self._units


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Let the kernel back fresh memory by huge pages, where it can: XLA's own allocator takes a fault for every 4 KB."""
    if nbytes >= _LARGE_NBYTES:
        begin = -(-address // _PAGE_NBYTES) * _PAGE_NBYTES
        _madvise(begin, (address + nbytes - begin) // _PAGE_NBYTES * _PAGE_NBYTES, _MADV_HUGEPAGE)
