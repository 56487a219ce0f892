"""The setting autotune: changes the layout of gradients while the job trains, on all ranks after the same step.

Every step also sums a small tensor. Rank 0 writes its decision into it, and every rank writes whether the next layout
is ready there. As all ranks read the same sum after the same step, all of them declare, switch and retire layouts at
the same step; no other protocol is needed. Layouts are declared in the background while steps go on with another one.

Step times are rank 0's: the ranks of a job take the same time for a step, because each waits for the others.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ..orchestration.errors import BpsError, ProtocolError
from ..orchestration.messages import TensorSpec
from .gradient_layout import GradientLayout, LayoutSizes
from .session import Session
from .tuning_search import TuningPoint
from .tuning_trials import Decision, RecordedTrials

log = logging.getLogger("bpsfast.tuner")

#: Words of the small tensor: rank 0's decision (number, is_last, the active point, the coming one), then how many ranks
#: have the coming layout, and how many cannot have it.
_N_OF_POINT = len(TuningPoint._fields)
_READY = 2 + 2 * _N_OF_POINT
_FAILED, _N_WORDS = _READY + 1, _READY + 2
#: Steps for which a layout stays after its last one: until then its results may be read.
_N_LINGER = 2
_FIRST_OF_ALL = 1 << 40


class Tuner:
    """Tunes one model's gradients. Used by the thread that ends steps.

    *tuned*: the result of an earlier job (rank 0's counts), which is used without a search.
    """

    def __init__(self, session: Session, name: str, specs: Mapping[str, TensorSpec], layout: GradientLayout,
                 by_priority: Sequence[str], tuned: TuningPoint | None = None) -> None:
        self._session = session
        self._name = f"Tuning of {name}"
        self._specs = specs
        self._by_priority = list(by_priority)
        self._first = layout
        settings = session.settings
        present = TuningPoint(settings.partition_bytes, settings.fusion_bytes, settings.credit_bytes,
                              settings.tcp_streams)
        self._settings_layout = present.layout
        self._point = present
        self._layouts = {present.layout: layout}
        self._leaving: dict[tuple[int, int, int], int] = {}  # sizes -> steps until it is retired
        self._dropped: list[GradientLayout] = []
        self._coming: GradientLayout | None = None
        self._coming_point = present
        self._coming_state = [0, 0]  # ready, failed
        self._n_layouts = 0
        self._number = 0  # of the last decision that was obeyed
        self._ended = 0.0
        self._is_last = False
        self._announced = self._counted = False  # of the step that is being ended
        self._runner = RecordedTrials(session, specs, present, tuned) if session.rank == 0 else None
        session.tensors.declare([TensorSpec(name=self._name, dtype="float64", shape=(_N_WORDS,), average=False,
                                            priority=_FIRST_OF_ALL)])

    @property
    def best(self) -> TuningPoint | None:
        """The best point so far, as far as this rank knows: before the end of the search only rank 0 does."""
        if self._runner is not None:
            return self._runner.best
        return self._point if self._is_last else None

    @property
    def is_over(self) -> bool:
        return self._is_last and not self._leaving and not self._dropped

    def announce(self) -> None:
        """Push this step's small tensor: rank 0's decision, and what is ready on this rank."""
        if self._announced:
            return  # this step is ended again, because the first attempt failed
        self._counted = False
        if not self._is_last:
            unit = self._session.tensors.unit(self._name)
            self._look_after_coming()
            words = unit.staging.array[:8 * _N_WORDS].view(np.float64)
            words[:] = 0
            if self._runner is not None:
                words[:_READY] = _encoded(self._runner.decision)
            words[_READY], words[_FAILED] = self._coming_state
            unit.push()
        self._announced = True

    def conclude(self, timeout_s: float) -> GradientLayout:
        """Wait for the small tensor, carry out the decision, and return the layout of the next step.

        Raises `StallError` or `PeerLostError` as `push_pull`.
        """
        unit = None if self._is_last else self._session.tensors.unit(self._name)
        if unit is not None:
            unit.wait(unit.round, timeout_s)
        self._retire(timeout_s)
        self._announced = False
        if unit is None:
            return self._layouts[self._point.layout]
        used = self._point
        words = unit.view(unit.round)[:8 * _N_WORDS].view(np.float64).tolist()
        number, is_last, active, coming = _decoded(words)
        if number != self._number:
            self._number = number
            self._obey(active, coming)
        elif self._coming is not None and words[_FAILED]:
            self._drop()
        elif self._coming is not None and words[_READY] == self._session.size:
            self._layouts[self._coming_point.layout] = self._coming
            self._coming = None
            self._use(self._coming_point)
        if is_last:
            self._end()
        now = time.monotonic()
        if self._runner is not None and self._ended and not is_last:
            self._runner.observe(used, now - self._ended)
        self._ended = now
        return self._layouts[self._point.layout]

    # -- the same on all ranks -------------------------------------------------------------------------------------

    def _obey(self, active: TuningPoint, coming: TuningPoint | None) -> None:
        if active.layout not in self._layouts:
            raise ProtocolError(f"rank 0 has decided for {active}, for which this rank has no layout: a bug in bpsfast")
        if self._coming is not None:  # a new decision before it was ready
            self._dropped.append(self._coming)
            self._coming, self._coming_state = None, [0, 0]
        kept = {active.layout} | ({coming.layout} if coming is not None else set())
        for sizes in self._layouts:
            if sizes in kept:
                self._leaving.pop(sizes, None)
            else:
                self._leaving.setdefault(sizes, _N_LINGER)
        self._use(active)
        if coming is not None and coming.layout in self._layouts:
            self._use(coming)
        elif coming is not None:
            self._n_layouts += 1
            self._coming_point, self._coming_state = coming, [0, 0]
            sizes = LayoutSizes() if coming.layout == self._settings_layout else LayoutSizes(*coming.layout)
            self._coming = GradientLayout(self._session, self._specs, self._n_layouts, sizes, self._first.device)

    def _use(self, point: TuningPoint) -> None:
        if self._runner is not None and point.credit_nbytes != self._point.credit_nbytes:
            own = self._session.settings.credit_bytes  # 0: back to every node's own setting
            self._session.set_credit(0 if point.credit_nbytes == own else point.credit_nbytes)
        self._point = point

    def _drop(self) -> None:
        """Drop the coming layout, which some rank cannot have; it is retired once it is committed."""
        assert self._coming is not None
        self._dropped.append(self._coming)
        self._coming, self._coming_state = None, [0, 0]
        if self._runner is not None:
            self._runner.failed(self._coming_point)

    def _end(self) -> None:
        self._is_last = True
        self._session.retire([self._session.tensors.unit(self._name)], releases_staging=True)
        if self._runner is not None:
            self._runner.save()

    # -- on each rank independently --------------------------------------------------------------------------------

    def _look_after_coming(self) -> None:
        """Lay the coming layout out as soon as it is committed."""
        if self._coming is None or any(self._coming_state):
            return
        try:
            if self._coming.is_committed:
                self._coming.lay_out(self._by_priority, self._first)
                self._coming_state = [1, 0]
        except BpsError as exc:
            self._session.port.check()  # the end of the job is not a refusal
            log.info("rank %d cannot have %s: %s", self._session.rank, self._coming_point, exc)
            self._coming_state = [0, 1]

    def _retire(self, timeout_s: float) -> None:
        if not self._counted:  # once a step, also if it is ended twice
            self._counted = True
            self._leaving = {sizes: left - 1 for sizes, left in self._leaving.items()}
        for sizes in [sizes for sizes, left in self._leaving.items() if left <= 0]:
            layout = self._layouts[sizes]
            layout.retire(timeout_s, keeps_input=layout is self._first)
            del self._layouts[sizes], self._leaving[sizes]
        for layout in list(self._dropped):
            try:
                is_there = layout.is_committed
            except BpsError:
                self._session.port.check()
                self._dropped.remove(layout)
                layout.abandon()
            else:
                if is_there:
                    self._dropped.remove(layout)
                    layout.retire(timeout_s, keeps_input=False)


def _encoded(decision: Decision) -> list[float]:
    coming = decision.coming or TuningPoint(*[0] * _N_OF_POINT)
    return [float(each) for each in (decision.number, decision.is_last, *decision.active, *coming)]


def _decoded(words: Sequence[float]) -> tuple[int, bool, TuningPoint, TuningPoint | None]:
    number, is_last, *rest = (int(each) for each in words[:_READY])
    coming = TuningPoint(*rest[_N_OF_POINT:])
    return number, bool(is_last), TuningPoint(*rest[:_N_OF_POINT]), coming if coming.partition_nbytes else None
